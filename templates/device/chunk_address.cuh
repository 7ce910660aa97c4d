// Where 8 columns of a row lie in a tile.
template <int kRows, int kTileSlabs>
__device__ __forceinline__ u32 chunk_address(const SlabTile<kRows, kTileSlabs>& tile, u32 row,
                                             u32 chunk) {
  const u32 slab = ptx::smem_address(&tile) + chunk / 8 * sizeof(tile.slab[0]);
  return slab + row * 128 + (chunk % 8 ^ row % 8) * 16;
}
