//% if kernel.softcap
  const float softcap = 50.f;
  const float softcap_scale = 1.f / (softcap * sqrtf(kHeadDim));
  const float softcap_log2 = 1.442695041f * softcap;
//% else
  const float scale_log2 = 1.442695041f / sqrtf(kHeadDim);
//% endif
//% if kernel.mask == "window"
  const int window_left = 1023, window_right = 0;
//% endif
//% if kernel.bias == "alibi"
  const auto slope = [&](i64 h) { return exp2f(-8.f * (h + 1) / heads); };
  const float* slopes = made<float>(heads, slope);
//% elif kernel.bias_dtype
  const Bias* bias = made<Bias>(i64(seq_q) * seq_kv, [](i64) { return Bias(0); });
  const Strides bias_strides = {0, 0, seq_kv};
//% endif
//% if kernel.scaled and not kernel.quantises
  const auto one = [](i64) { return 1.f; };
  const float* q_scale = made<float>(i64(batch) * heads$(" * ((seq_q + 127) / 128" ~ (" + 1" if kernel.varlen) ~ ")" if kernel.scales == "block"), one);
  const float* k_scale = made<float>(i64(batch) * kv_heads$(" * ((seq_kv + 127) / 128" ~ (" + 1" if kernel.varlen) ~ ")" if kernel.scales == "block"), one);
  const float* v_scale = made<float>(i64(batch) * kv_heads$(" * ((seq_kv + 127) / 128" ~ (" + 1" if kernel.varlen) ~ ")" if kernel.scales == "block"), one);
//% endif
//% if kernel.varlen
  const int longest_q = seq_q,$(" longest_k = seq_kv," if kernel.pass_ == "bwd" or kernel.algo == "v3") total_q = batch * seq_q;
  const int* cu_seqlens_q = made<int>(batch + 1, [&](i64 i) { return int(i * seq_q); });
  const int* cu_seqlens_k = made<int>(batch + 1, [&](i64 i) { return int(i * seq_kv); });
//% endif
//% if kernel.longest_first
//% set length, rows = ("seq_q", "kBlockQ") if kernel.pass_ == "fwd" else ("seq_kv", "kBlockKV")
  int places = 132;  // of blocks at once, as if an SM had two
  cudaDeviceGetAttribute(&places, cudaDevAttrMultiProcessorCount, 0);
  places *= 2;
  const int tiles = ($(length) + $(rows) - 1) / $(rows);
  const int heads_together = tiles > 0 && tiles < places ? places / tiles : 1;
//% endif
