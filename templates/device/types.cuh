using u16 = unsigned short;
using u32 = unsigned int;
using i64 = long long;

struct Strides {  // of one tensor, in elements; its last dimension is contiguous
  i64 batch, head, seq;
};

using Element = $(ctype(kernel.dtype));  // $(kernel.dtype)
using Output = $(ctype(kernel.out_dtype));  // $(kernel.out_dtype)
