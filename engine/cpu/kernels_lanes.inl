// SPDX-License-Identifier: Apache-2.0
// Groups of 16 lanes: arithmetic, fixed-order reductions, exp, rounding, and the product of cells that every sum is made of.
// Part of kernels.inl, which includes it inside the namespace of one instruction set.

using Float = hn::CappedTag<float, 16>;
using Int = hn::RebindToSigned<Float>;
using Unsigned = hn::RebindToUnsigned<Float>;
using Half = hn::Rebind<std::uint16_t, Float>;
using FloatVector = hn::Vec<Float>;
using CellVector = hn::Vec<Unsigned>;

inline constexpr int lanes = static_cast<int>(hn::MaxLanes(Float()));
inline constexpr int vectors = 16 / lanes;  // of a group

// Accumulators must fit the registers: rows x groups x vectors, beside the operands.
inline constexpr int panel_groups = lanes == 16 ? 4 : 2;
inline constexpr int rows_max = lanes == 16 ? 6 : (lanes == 8 ? 3 : 2);

struct Bfloat16 {
  using Stored = std::uint16_t;
};
struct Float32 {
  using Stored = float;
};
template <class Element>
inline constexpr int per_cell = static_cast<int>(4 / sizeof(typename Element::Stored));

struct Group {
  FloatVector v[vectors];
};
struct CellGroup {
  CellVector v[vectors];
};

template <class Function>
HWY_INLINE Group make_group(Function&& function) {
  Group out;
#pragma GCC unroll 16
  for (int i = 0; i < vectors; ++i) out.v[i] = function(i);
  return out;
}

HWY_INLINE Group splat(float value) {
  return make_group([&](int) HWY_ATTR { return hn::Set(Float(), value); });
}
HWY_INLINE Group load(const float* from) {
  return make_group([&](int i) HWY_ATTR { return hn::LoadU(Float(), from + i * lanes); });
}
HWY_INLINE void store(const Group& group, float* to) {
#pragma GCC unroll 16
  for (int i = 0; i < vectors; ++i) hn::StoreU(group.v[i], Float(), to + i * lanes);
}
HWY_INLINE Group add(const Group& a, const Group& b) {
  return make_group([&](int i) HWY_ATTR { return hn::Add(a.v[i], b.v[i]); });
}
HWY_INLINE Group multiply(const Group& a, const Group& b) {
  return make_group([&](int i) HWY_ATTR { return hn::Mul(a.v[i], b.v[i]); });
}
HWY_INLINE Group multiply_add(const Group& a, const Group& b, const Group& c) {
  return make_group([&](int i) HWY_ATTR { return hn::MulAdd(a.v[i], b.v[i], c.v[i]); });
}
HWY_INLINE Group max(const Group& a, const Group& b) {
  return make_group([&](int i) HWY_ATTR { return hn::Max(a.v[i], b.v[i]); });
}

/// Sum of 16 lanes by the tree 8 + 8, 4 + 4, 2 + 2, 1 + 1, on every instruction set; AVX-512's own reduction is that tree.
HWY_INLINE float sum_of(const Group& group) {
  if constexpr (lanes == 16) return hn::GetLane(hn::SumOfLanes(Float(), group.v[0]));
  float lane[16];
  store(group, lane);
  for (int step = 8; step > 0; step /= 2) {
    for (int i = 0; i < step; ++i) lane[i] += lane[i + step];
  }
  return lane[0];
}
HWY_INLINE float max_of(const Group& group) {
  if constexpr (lanes == 16) return hn::GetLane(hn::MaxOfLanes(Float(), group.v[0]));
  float lane[16];
  store(group, lane);
  for (int step = 8; step > 0; step /= 2) {
    for (int i = 0; i < step; ++i) lane[i] = lane[i] > lane[i + step] ? lane[i] : lane[i + step];
  }
  return lane[0];
}

/// e^x to about 2 ulp: x = n ln 2 + r, Taylor's series of degree 7 for e^r, n into the exponent. 0 below -87, infinity above 88;
/// NaN stays.
HWY_INLINE FloatVector exp_of(FloatVector x) {
  const Float d;
  const Int di;
  const auto n = hn::NearestInt(hn::Mul(x, hn::Set(d, 1.44269504088896341F)));
  const auto nf = hn::ConvertTo(d, n);
  auto r = hn::NegMulAdd(nf, hn::Set(d, 0.693359375F), x);  // ln 2 in two parts, the first exact in few bits
  r = hn::NegMulAdd(nf, hn::Set(d, -2.12194440e-4F), r);
  auto p = hn::Set(d, 1.0F / 5040.0F);
  p = hn::MulAdd(p, r, hn::Set(d, 1.0F / 720.0F));
  p = hn::MulAdd(p, r, hn::Set(d, 1.0F / 120.0F));
  p = hn::MulAdd(p, r, hn::Set(d, 1.0F / 24.0F));
  p = hn::MulAdd(p, r, hn::Set(d, 1.0F / 6.0F));
  p = hn::MulAdd(p, r, hn::Set(d, 0.5F));
  p = hn::MulAdd(p, r, hn::Set(d, 1.0F));
  p = hn::MulAdd(p, r, hn::Set(d, 1.0F));
  auto result = hn::BitCast(d, hn::Add(hn::BitCast(di, p), hn::ShiftLeft<23>(n)));
  result = hn::IfThenElse(hn::Gt(x, hn::Set(d, 88.0F)), hn::Set(d, std::numeric_limits<float>::infinity()), result);
  return hn::IfThenElse(hn::Lt(x, hn::Set(d, -87.0F)), hn::Zero(d), result);
}
HWY_INLINE Group exp_of(const Group& x) {
  return make_group([&](int i) HWY_ATTR { return exp_of(x.v[i]); });
}
HWY_INLINE float exp_of(float x) {
  return hn::GetLane(exp_of(hn::Set(Float(), x)));
}

/// x / (1 + e^-x)
HWY_INLINE Group silu(const Group& x) {
  return make_group([&](int i) HWY_ATTR {
    const Float d;
    const auto sigmoid = hn::Div(hn::Set(d, 1.0F), hn::Add(hn::Set(d, 1.0F), exp_of(hn::Neg(x.v[i]))));
    return hn::Mul(x.v[i], sigmoid);
  });
}
HWY_INLINE Group swiglu(const Group& gate, const Group& up) {
  return multiply(silu(gate), up);
}

/// ln(1 + e^x) = max(x, 0) + log1p(z) with z = e^-|x|; log1p(z) = 2 artanh(s) with s = z / (2 + z) <= 1/3, whose series ends
/// below one rounding. NaN stays.
HWY_INLINE Group softplus(const Group& x) {
  return make_group([&](int i) HWY_ATTR {
    const Float d;
    const auto z = exp_of(hn::Neg(hn::Abs(x.v[i])));
    const auto s = hn::Div(z, hn::Add(hn::Set(d, 2.0F), z));
    const auto square = hn::Mul(s, s);
    auto p = hn::Set(d, 1.0F / 15.0F);
    p = hn::MulAdd(p, square, hn::Set(d, 1.0F / 13.0F));
    p = hn::MulAdd(p, square, hn::Set(d, 1.0F / 11.0F));
    p = hn::MulAdd(p, square, hn::Set(d, 1.0F / 9.0F));
    p = hn::MulAdd(p, square, hn::Set(d, 1.0F / 7.0F));
    p = hn::MulAdd(p, square, hn::Set(d, 1.0F / 5.0F));
    p = hn::MulAdd(p, square, hn::Set(d, 1.0F / 3.0F));
    p = hn::MulAdd(p, square, hn::Set(d, 1.0F));
    const auto positive = hn::IfThenElse(hn::Gt(x.v[i], hn::Zero(d)), x.v[i], hn::Zero(d));
    return hn::MulAdd(hn::Add(s, s), p, positive);
  });
}
/// x between lowest and highest; NaN stays.
HWY_INLINE Group clamp(const Group& x, float lowest, float highest) {
  return make_group([&](int i) HWY_ATTR {
    const auto low = hn::Set(Float(), lowest);
    const auto high = hn::Set(Float(), highest);
    const auto raised = hn::IfThenElse(hn::Lt(x.v[i], low), low, x.v[i]);
    return hn::IfThenElse(hn::Gt(raised, high), high, raised);
  });
}

HWY_INLINE void store_elements(const Group& group, float* to) {
  store(group, to);
}

/// Rounds to nearest even.
HWY_INLINE void store_elements(const Group& group, std::uint16_t* to) {
#if RUBATO_BFLOAT16_DOT
  const __m256bh rounded = _mm512_cvtneps_pbh(group.v[0].raw);
  std::memcpy(to, &rounded, sizeof rounded);
#else
  const Unsigned du;
#pragma GCC unroll 16
  for (int i = 0; i < vectors; ++i) {
    const auto bits = hn::BitCast(du, group.v[i]);
    const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(du, 1U));
    const auto rounded = hn::ShiftRight<16>(hn::Add(hn::Add(bits, hn::Set(du, 0x7FFFU)), odd));
    const auto nan = hn::Or(hn::ShiftRight<16>(bits), hn::Set(du, 0x40U));
    const auto is_nan = hn::RebindMask(du, hn::IsNaN(group.v[i]));
    const auto chosen = hn::IfThenElse(is_nan, nan, rounded);
    hn::StoreU(hn::DemoteTo(Half(), hn::BitCast(Int(), chosen)), Half(), to + i * lanes);
  }
#endif
}

/// The first count lanes of a group in memory that ends with them; the others are zero.
HWY_INLINE Group load_first(const float* from, std::int32_t count) {
  if (count >= group_columns) return load(from);
  float lane[group_columns] = {};
  for (std::int32_t i = 0; i < count; ++i) lane[i] = from[i];
  return load(lane);
}
template <class Stored>
HWY_INLINE void store_first(const Group& group, Stored* to, std::int32_t count) {
  if (count >= group_columns) return store_elements(group, to);
  Stored lane[group_columns];
  store_elements(group, lane);
  for (std::int32_t i = 0; i < count; ++i) to[i] = lane[i];
}

HWY_INLINE std::uint16_t round_element(float value, std::uint16_t) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  const std::uint32_t rounded = (bits + 0x7FFFU + ((bits >> 16) & 1U)) >> 16;
  const std::uint32_t nan = (bits >> 16) | 0x40U;
  return static_cast<std::uint16_t>((bits & 0x7FFFFFFFU) > 0x7F800000U ? nan : rounded);
}
HWY_INLINE float round_element(float value, float) {
  return value;
}

HWY_INLINE CellGroup load_cells(const std::uint32_t* from) {
  CellGroup out;
#pragma GCC unroll 16
  for (int i = 0; i < vectors; ++i) out.v[i] = hn::LoadU(Unsigned(), from + i * lanes);
  return out;
}

/// sum += a * b, a one cell for all lanes. BF16: the two products of a cell in one fixed order.
template <class Element>
HWY_INLINE void multiply_cell(Group& sum, std::uint32_t a, const CellGroup& b) {
  const Unsigned du;
  const Float d;
#pragma GCC unroll 16
  for (int i = 0; i < vectors; ++i) {
    if constexpr (per_cell<Element> == 1) {
      sum.v[i] = hn::MulAdd(hn::BitCast(d, hn::Set(du, a)), hn::BitCast(d, b.v[i]), sum.v[i]);
    } else {
#if RUBATO_BFLOAT16_DOT
      const __m512i pair = _mm512_set1_epi32(static_cast<int>(a));
      sum.v[i].raw = _mm512_dpbf16_ps(sum.v[i].raw, reinterpret_cast<__m512bh>(b.v[i].raw), reinterpret_cast<__m512bh>(pair));
#else
      const auto high = hn::Set(du, 0xFFFF0000U);
      sum.v[i] = hn::MulAdd(hn::BitCast(d, hn::Set(du, a << 16)), hn::BitCast(d, hn::ShiftLeft<16>(b.v[i])), sum.v[i]);
      sum.v[i] = hn::MulAdd(hn::BitCast(d, hn::Set(du, a & 0xFFFF0000U)), hn::BitCast(d, hn::And(b.v[i], high)), sum.v[i]);
#endif
    }
  }
}

HWY_INLINE std::uint32_t cell_at(const std::uint32_t* cells) {
  std::uint32_t cell;
  std::memcpy(&cell, cells, sizeof cell);
  return cell;
}

/// Calls function with a constant of 1 .. rows_max for count.
template <class Function>
HWY_INLINE void with_rows(std::int32_t count, Function&& function) {
  switch (count) {
    case 1:
      return function(std::integral_constant<int, 1>());
    case 2:
      return function(std::integral_constant<int, 2>());
    case 3:
      if constexpr (rows_max >= 3) return function(std::integral_constant<int, 3>());
      break;
    case 4:
      if constexpr (rows_max >= 4) return function(std::integral_constant<int, 4>());
      break;
    case 5:
      if constexpr (rows_max >= 5) return function(std::integral_constant<int, 5>());
      break;
    case 6:
      if constexpr (rows_max >= 6) return function(std::integral_constant<int, 6>());
      break;
  }
}

/// Cuts rows into tiles of nearly equal size, at most rows_max: function(first, constant count).
template <class Function>
HWY_INLINE void for_row_tiles(std::int32_t rows, Function&& function) {
  const std::int32_t tiles = (rows + rows_max - 1) / rows_max;
  std::int32_t first = 0;
  for (std::int32_t tile = 0; tile < tiles; ++tile) {
    const std::int32_t count = (rows - first + tiles - tile - 1) / (tiles - tile);
    with_rows(count, [&](auto constant) HWY_ATTR { function(first, constant); });
    first += count;
  }
}
