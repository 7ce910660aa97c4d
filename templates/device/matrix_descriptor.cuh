// How the rows of a tile in shared memory are swizzled: in spans of so many bytes.
enum class Swizzle : u32 { kNone = 0, k128 = 1, k64 = 2, k32 = 3 };

// A matrix in shared memory as wgmma sees it. Offsets are in bytes: `leading` between core matrices
// along the contiguous direction (unused where one swizzled span holds all), `stride` between groups
// of 8 rows. PTX ISA: asynchronous warpgroup level matrix shared memory layout.
__device__ __forceinline__ u64 matrix_descriptor(u32 address, u32 leading, u32 stride,
                                                 Swizzle swizzle) {
  return u64((address & 0x3ffff) >> 4) | u64(leading >> 4) << 16 | u64(stride >> 4) << 32 |
         u64(swizzle) << 62;
}
