// Where a key's values stand in V transposed. Of every 16 keys a thread's weights are those of columns
// 2t, 2t + 1, 2t + 8 and 2t + 9, and it hands them over as 4t to 4t + 3: so the keys lie in that order.
__device__ constexpr int key_at(int place) {
  return place / 16 * 16 + place % 16 / 4 * 2 + place % 2 + place / 2 % 2 * 8;
}
