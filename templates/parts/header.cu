// $(kernel.stem)
//
// regenerate  fasim gen $(kernel.stem).cu
// compile     nvcc -std=c++17 -arch=$(kernel.arch) -cubin $(kernel.stem).cu
// run alone   nvcc -std=c++17 $(arch_flags(kernel)) -DFASIM_MAIN $(kernel.stem).cu && ./a.out
//% for stage in launch.stages
// launch      $(stage.entry)<<<$(stage.grid), $(stage.block), $(stage.smem_bytes)>>>, as planned
//% endfor
//
// arguments
//% for name, kind in kernel.arguments
//   $("%-5s" % kind)  $("%-10s" % name)  $(launch.scalars.get(name, "device memory"))
//% endfor
//
// shared memory
//% for name, start, size in memory_map(plan)
//   from $("%6d" % start)  $("%6d" % size) bytes  $(name)
//% endfor
//
// templates, with the first 8 digits of their sha256
//% for name, digest in templates.items()
//   $(digest)  $(name)
//% endfor
//
