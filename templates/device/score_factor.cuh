// What makes real numbers of Q K^T, at least the smallest normal one: scale factors of zeros, or of
// next to nothing, have a product of 0, and 0 times the -inf of a hidden key would be NaN. Scores
// times so little differ in no bit of a weight.
__device__ __forceinline__ float normal_factor(float product) {
  constexpr float kLeast = 1.17549435e-38f;
  return product < kLeast ? kLeast : product;
}
