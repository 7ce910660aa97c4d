//% include "device/integers.cuh"

struct Strides {  // of one tensor, in elements; its last dimension is contiguous
  i64 batch, head, seq;
};

using Element = $(ctype(kernel.dtype));  // $(kernel.dtype)
using Output = $(ctype(kernel.out_dtype));  // $(kernel.out_dtype)
//% if kernel.bias_dtype
using Bias = $(ctype(kernel.bias_dtype));  // $(kernel.bias_dtype)
//% endif
