// What the kernel's side of the emulator asks of the runtime. `line` is the caller's line.
#pragma once

namespace emulator {

struct Dim3 {
  unsigned x, y, z;
};
Dim3 thread_index();
Dim3 block_index();
Dim3 block_dim();
Dim3 grid_dim();
unsigned long long clock64();  // how often a thread of the block asked, this time too: no time

enum Shuffle { kFrom, kUp, kDown, kXor };
enum Vote { kBallot, kAll, kAny };
enum Type { kF16, kBf16, kE4m3 };

void barrier(unsigned id, unsigned threads, bool sleep, unsigned line);
void syncwarp(unsigned mask, unsigned line);
unsigned long long shuffle(Shuffle how, unsigned mask, unsigned long long value, int by, int width,
                           unsigned line);
unsigned vote(Vote how, unsigned mask, bool predicate, unsigned line);

unsigned smem_address(const void* pointer, unsigned line);
void cp_async(void* smem, const void* global, unsigned bytes, bool valid, unsigned line);
void cp_async_commit_group(unsigned line);
void cp_async_wait_group(unsigned groups, unsigned line);
void ldmatrix(unsigned* r, unsigned matrices, bool transposed, unsigned row, unsigned line);
void mma(Type type, unsigned depth, float* d, const unsigned* a, const unsigned* b, unsigned line);

void stmatrix(unsigned row, const unsigned* r, unsigned matrices, bool transposed, unsigned line);

void mbarrier_init(const void* mbarrier, unsigned count, unsigned line);
void mbarrier_arrive(const void* mbarrier, unsigned arrivals, long long bytes, unsigned line);
bool mbarrier_try_wait(const void* mbarrier, unsigned parity, unsigned line);
void fence_mbarrier_init(unsigned line);
void fence_proxy_async(unsigned line);

void load_box(void* smem, const void* map, const void* mbarrier, const int* at, unsigned rank,
              unsigned line);
void store_box(const void* map, const void* smem, const int* at, unsigned rank, bool adds,
               unsigned line);
void load_bulk(void* smem, const void* global, unsigned bytes, const void* mbarrier, unsigned line);
void store_bulk(void* global, const void* smem, unsigned bytes, bool adds, unsigned line);
void bulk_commit_group(unsigned line);
void bulk_wait_group(unsigned groups, bool only_read, unsigned line);

struct ProductOperands {  // of one thread
  Type type;
  unsigned columns;
  bool transpose_a, transpose_b;
  float* d;
  const unsigned* a;  // null: in shared memory
  unsigned long long a_descriptor, b_descriptor;
  bool add;
};
void wgmma(const ProductOperands& operands, unsigned line);
void wgmma_fence(unsigned line);
void wgmma_commit_group(unsigned line);
void wgmma_wait_group(unsigned groups, unsigned line);
void setmaxnreg(unsigned registers, bool more, unsigned line);
bool elect_sync(unsigned line);

float ex2(float x, unsigned line);
float lg2(float x, unsigned line);
float rcp(float x, unsigned line);
unsigned cvt_pair(Type type, float low, float high, unsigned line);
float cvt_from(Type type, unsigned code, unsigned line);
unsigned cvt_f16x2_e4m3x2(unsigned pair, unsigned line);

float atom_add(float* global, float x, unsigned line);
void atom_add_x4(float* global, const float (&x)[4], unsigned line);
unsigned atom_add(unsigned* global, unsigned x, unsigned line);
unsigned ld_acquire(const unsigned* global, unsigned line);
void red_release_add(unsigned* global, unsigned x, unsigned line);
void trap(unsigned line);

}  // namespace emulator
