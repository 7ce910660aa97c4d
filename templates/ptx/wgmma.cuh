namespace ptx {
#ifndef FASIM_EMULATE

/*# The one wrapper that is a template: PTX wants every register of D named. It takes `type` (f16, bf16
    or e4m3), `n` (the columns), `a` (where A lies: shared or registers) and perhaps `fresh`: a second form that
    only writes D. #*/
//% set depth = 32 if type == "e4m3" else 16
//% set count = n // 2
//% set b = count + (4 if a == "registers" else 1)
//% set flags = [] if type == "e4m3" else ["kTransposeB"] if a == "registers" else ["kTransposeA", "kTransposeB"]
//% set places = range(b + 2, b + 2 + flags | length)
//% set forms = ["", "_fresh"] if fresh is defined and fresh else [""]
// d = a b, or d += a b, for 64 x $(n) elements, $(depth) deep, by a warpgroup, in the background.
//% if a == "registers"
// Lane 4 g + t of warp w holds rows 16 w + g and 16 w + g + 8 of a, as for mma; b describes a matrix in
// shared memory.
//% else
// Both a and b describe matrices in shared memory.
//% endif
//% if flags
// Transposed: it is not the depth that is contiguous, but the rows of a, the columns of b.
//% endif
// Lane 4 g + t of warp w: d[4 i + 2 j + k] = row 16 w + g + 8 j, column 8 i + 2 t + k.
//% if forms | length > 1
// Fresh: d = a b, and the compiler need not keep what was in d.
//% endif
// PTX ISA: wgmma.mma_async.
// clang-format off
//% for form in forms
//% if flags
template <int $(flags | join(" = 0, int ")) = 0>
//% endif
__device__ __forceinline__ void wgmma_m64k$(depth)_$(type)$(form)(
    float (&d)[$(count)], $("const u32 (&a)[4]" if a == "registers" else "u64 a"), u64 b$("" if form else ", bool add")) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, $("0" if form else "%" ~ (b + 1)), 0;\n"
      "wgmma.mma_async.sync.aligned.m64n$(n)k$(depth).f32.$(type).$(type) {"
//% for first in range(0, count, 8)
      "%$(range(first, [first + 8, count] | min) | join(", %"))$("}, " if loop.last else ", ")"
//% endfor
//% if a == "registers"
      "{%$(range(count, b) | join(", %"))}, "
//% else
      "%$(count), "
//% endif
      "%$(b), p, 1, 1$(", %" if flags else "")$(places | join(", %"));\n"
      "}\n"
      :
//% for first in range(0, count, 8)
        "$("=" if form else "+")f"(d[$(range(first, [first + 8, count] | min) | join(']), "' ~ ("=" if form else "+") ~ 'f"(d['))])$("" if loop.last else ",")
//% endfor
//% if a == "registers"
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b)$("" if form else ', "r"(int(add))')
//% else
      : "l"(a), "l"(b)$("" if form else ', "r"(int(add))')
//% endif
//% if flags
      , "n"($(flags | join('), "n"(')))
//% endif
      : "memory");
}
//% endfor
// clang-format on

#endif
}  // namespace ptx
