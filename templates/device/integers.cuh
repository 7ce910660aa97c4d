using u16 = unsigned short;
using u32 = unsigned int;
using i64 = long long;
