// SPDX-License-Identifier: Apache-2.0
// The text of all kernels, compiled once per instruction set by kernels.cpp (Highway's dispatch) and once more by
// kernels_bfloat16_dot.cpp. Included several times per file on purpose, so it has no include guard.
//
// Everything is written on groups of 16 lanes, of which a vector holds 1, 2, 4, 8 or all: an instruction set chooses how fast a
// group is, never the order of a sum.

#ifndef RUBATO_KERNEL_SPACE
#error "define RUBATO_KERNEL_SPACE and RUBATO_BFLOAT16_DOT before including kernels-inl.h"
#endif

HWY_BEFORE_NAMESPACE();
#if RUBATO_BFLOAT16_DOT
#pragma GCC push_options
#pragma GCC target("avx512bf16")
#endif
namespace rubato::engine::cpu::RUBATO_KERNEL_SPACE {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

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

/// Sum of 16 lanes by the tree 8 + 8, 4 + 4, 2 + 2, 1 + 1, on every instruction set.
HWY_INLINE float sum_of(const Group& group) {
  float lane[16];
  store(group, lane);
  for (int step = 8; step > 0; step /= 2) {
    for (int i = 0; i < step; ++i) lane[i] += lane[i + step];
  }
  return lane[0];
}
HWY_INLINE float max_of(const Group& group) {
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

/// gate / (1 + e^-gate) * up
HWY_INLINE Group swiglu(const Group& gate, const Group& up) {
  return make_group([&](int i) HWY_ATTR {
    const Float d;
    const auto sigmoid = hn::Div(hn::Set(d, 1.0F), hn::Add(hn::Set(d, 1.0F), exp_of(hn::Neg(gate.v[i]))));
    return hn::Mul(hn::Mul(gate.v[i], sigmoid), up.v[i]);
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

// ---- products
// ---------------------------------------------------------------------------------------------------------------------------

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

// ---- linear
// -----------------------------------------------------------------------------------------------------------------------------

// 128 cells of a panel are 32 KiB: they stay in the first-level cache while all row tiles pass over them.
inline constexpr std::int32_t block_cells = 128;
inline constexpr std::int32_t cell_words = panel_groups * group_columns;  // of a panel

/// What a tile fetches while it computes: step words per cell. Panels lie one behind another, so there is always something to
/// fetch.
struct Ahead {
  const std::uint32_t* from = nullptr;
  std::int32_t step = 0;
};

/// A single tile runs as fast as memory delivers and fetches two KiB ahead of itself. With more tiles the first two fetch the
/// next block between them, so that memory is never idle, and the others repeat what is there.
HWY_INLINE Ahead fetch_ahead(const LinearTask& task, std::int32_t tile, std::int32_t begin, std::int32_t end) {
  const std::uint32_t* panel = task.panel + static_cast<std::int64_t>(begin) * cell_words;
  if (task.rows <= rows_max) return {.from = panel + 512, .step = cell_words};
  const std::uint32_t* next = task.panel + static_cast<std::int64_t>(end) * cell_words;
  if (tile >= 2) return {.from = next, .step = 0};
  return {.from = next + tile * (end - begin) * (cell_words / 2), .step = cell_words / 2};
}

template <class Element, int Rows>
HWY_INLINE void linear_tile(const LinearTask& task, std::int32_t first_row, std::int32_t begin, std::int32_t end, Ahead ahead,
                            Group (&sums)[Rows][panel_groups]) {
  const std::uint32_t* panel = task.panel + static_cast<std::int64_t>(begin) * cell_words;
  const std::uint32_t* x[Rows];
#pragma GCC unroll 8
  for (int row = 0; row < Rows; ++row) x[row] = static_cast<const std::uint32_t*>(task.x) + (first_row + row) * task.x_stride;
  for (std::int32_t cell = begin; cell < end; ++cell) {
    CellGroup weights[panel_groups];
#pragma GCC unroll 8
    for (int group = 0; group < panel_groups; ++group) {
      weights[group] = load_cells(panel + group * group_columns);
      hwy::Prefetch(ahead.from + group * group_columns);
    }
    ahead.from += ahead.step;
    panel += cell_words;
#pragma GCC unroll 8
    for (int row = 0; row < Rows; ++row) {
      const std::uint32_t a = cell_at(x[row] + cell);
#pragma GCC unroll 8
      for (int group = 0; group < panel_groups; ++group) multiply_cell<Element>(sums[row][group], a, weights[group]);
    }
  }
}

template <class Element, bool Gated, int Rows>
HWY_INLINE void finish_tile(const LinearTask& task, std::int32_t first_row, const Group (&sums)[Rows][panel_groups]) {
#pragma GCC unroll 8
  for (int row = 0; row < Rows; ++row) {
    if constexpr (Gated) {
      auto* out = static_cast<typename Element::Stored*>(task.out) + (first_row + row) * task.out_stride;
#pragma GCC unroll 8
      for (int group = 0; group < panel_groups / 2; ++group) {
        if (group < task.out_groups) {
          store_elements(swiglu(sums[row][group], sums[row][panel_groups / 2 + group]), out + group * group_columns);
        }
      }
    } else {
      float* out = static_cast<float*>(task.out) + (first_row + row) * task.out_stride;
#pragma GCC unroll 8
      for (int group = 0; group < panel_groups; ++group) {
        if (group >= task.out_groups) continue;
        const Group bias = task.bias == nullptr ? splat(0.0F) : load(task.bias + group * group_columns);
        store(add(sums[row][group], bias), out + group * group_columns);
      }
    }
  }
}

template <class Element, bool Gated>
void linear(const LinearTask& task) {
  // One tile of rows sees every weight once, so blocks would gain nothing. Blocks only park the F32 sums between cells: same
  // bits.
  const std::int32_t step = task.rows <= rows_max ? task.cells : block_cells;
  for (std::int32_t begin = 0; begin < task.cells; begin += step) {
    const std::int32_t end = begin + step < task.cells ? begin + step : task.cells;
    std::int32_t tile = 0;
    for_row_tiles(task.rows, [&](std::int32_t first, auto constant) HWY_ATTR {
      constexpr int tile_rows = decltype(constant)::value;
      Group sums[tile_rows][panel_groups];
      float* partial = task.partial + static_cast<std::int64_t>(first) * panel_groups * group_columns;
#pragma GCC unroll 8
      for (int row = 0; row < tile_rows; ++row) {
#pragma GCC unroll 8
        for (int group = 0; group < panel_groups; ++group) {
          sums[row][group] = begin == 0 ? splat(0.0F) : load(partial + (row * panel_groups + group) * group_columns);
        }
      }
      linear_tile<Element, tile_rows>(task, first, begin, end, fetch_ahead(task, tile++, begin, end), sums);
      if (end == task.cells) {
        finish_tile<Element, Gated, tile_rows>(task, first, sums);
        return;
      }
#pragma GCC unroll 8
      for (int row = 0; row < tile_rows; ++row) {
#pragma GCC unroll 8
        for (int group = 0; group < panel_groups; ++group) {
          store(sums[row][group], partial + (row * panel_groups + group) * group_columns);
        }
      }
    });
  }
}

// ---- norm
// -------------------------------------------------------------------------------------------------------------------------------

template <class Element>
void norm(const NormTask& task) {
  // Four chains hide the latency of the sum; they join in one fixed order.
  Group squares[4] = {splat(0.0F), splat(0.0F), splat(0.0F), splat(0.0F)};
  for (std::int32_t group = 0; group < task.groups; ++group) {
    float* x = task.x + group * group_columns;
    Group value = load(x);
    if (task.delta != nullptr) {
      value = add(value, load(task.delta + group * group_columns));
      store(value, x);
    }
    squares[group % 4] = multiply_add(value, value, squares[group % 4]);
  }
  const float sum = sum_of(add(add(squares[0], squares[1]), add(squares[2], squares[3])));
  const Group scale = splat(1.0F / std::sqrt(sum / static_cast<float>(task.columns) + task.epsilon));
  auto* out = static_cast<typename Element::Stored*>(task.out);
  for (std::int32_t group = 0; group < task.groups; ++group) {
    const Group value = multiply(load(task.x + group * group_columns), scale);
    store_elements(multiply(value, load(task.weight + group * group_columns)), out + group * group_columns);
  }
}

// ---- rope and cache
// ---------------------------------------------------------------------------------------------------------------------

HWY_INLINE void normalise_head(float* head, const float* weight, std::int32_t size, float epsilon) {
  float squares[16] = {};
  for (std::int32_t i = 0; i < size; ++i) squares[i % 16] += head[i] * head[i];
  float sum = 0;
  for (const float square : squares) sum += square;
  const float scale = 1.0F / std::sqrt(sum / static_cast<float>(size) + epsilon);
  for (std::int32_t i = 0; i < size; ++i) head[i] = head[i] * scale * weight[i];
}

HWY_INLINE void rotate_head(const RopeTask& task, float* HWY_RESTRICT head) {
  const std::int32_t half = task.layout.head_size / 2;
  const float* HWY_RESTRICT cosines = task.cosines;
  const float* HWY_RESTRICT sines = task.sines;
  for (std::int32_t i = 0; i < half; ++i) {
    const float a = head[i];
    const float b = head[half + i];
    head[i] = a * cosines[i] - b * sines[i];
    head[half + i] = b * cosines[i] + a * sines[i];
  }
}

template <class Element>
void rope(const RopeTask& task) {
  using Stored = typename Element::Stored;
  constexpr std::int32_t pack = per_cell<Element>;
  const std::int32_t size = task.layout.head_size;
  auto* HWY_RESTRICT query = static_cast<Stored*>(task.query);
  for (std::int32_t head = 0; head < task.layout.heads; ++head) {
    float* at = task.qkv + head * size;
    if (task.query_norm != nullptr) normalise_head(at, task.query_norm, size, task.epsilon);
    rotate_head(task, at);
    for (std::int32_t i = 0; i < size; ++i) query[head * size + i] = round_element(at[i], Stored());
  }
  for (std::int32_t head = 0; head < task.layout.kv_heads; ++head) {
    float* key = task.qkv + (task.layout.heads + head) * size;
    const float* value = key + task.layout.kv_heads * size;
    if (task.key_norm != nullptr) normalise_head(key, task.key_norm, size, task.epsilon);
    rotate_head(task, key);
    auto* keys = reinterpret_cast<Stored*>(task.block + head * task.layout.head_stride);
    auto* values = reinterpret_cast<Stored*>(task.block + head * task.layout.head_stride + task.layout.value_offset);
    for (std::int32_t i = 0; i < size; ++i) {
      keys[((i / pack) * kv_block_tokens + task.slot) * pack + i % pack] = round_element(key[i], Stored());
      values[((task.slot / pack) * size + i) * pack + task.slot % pack] = round_element(value[i], Stored());
    }
  }
}

// ---- attention
// --------------------------------------------------------------------------------------------------------------------------

inline constexpr int tile_blocks = attention_tile / kv_block_tokens;
inline constexpr int tile_groups = attention_tile / group_columns;

/// One tile of the cache, for one KV head.
struct CacheTile {
  const std::uint32_t* keys[tile_blocks];
  const std::uint32_t* values[tile_blocks];
};

/// scores(row, 64) = query . keys, before scaling. Slots past the end hold anything; the softmax masks them.
template <class Element>
HWY_INLINE void score_tile(const CacheTile& tile, std::int32_t cells, const std::uint32_t* const* queries, std::int32_t rows,
                           float* scores) {
  constexpr int groups = lanes == 16 ? 4 : 2;
  for_row_tiles(rows, [&](std::int32_t first, auto constant) HWY_ATTR {
    constexpr int tile_rows = decltype(constant)::value;
    for (int base = 0; base < tile_groups; base += groups) {
      Group sums[tile_rows][groups];
#pragma GCC unroll 8
      for (int row = 0; row < tile_rows; ++row) {
#pragma GCC unroll 8
        for (int group = 0; group < groups; ++group) sums[row][group] = splat(0.0F);
      }
      for (std::int32_t cell = 0; cell < cells; ++cell) {
        CellGroup keys[groups];
#pragma GCC unroll 8
        for (int group = 0; group < groups; ++group) keys[group] = load_cells(tile.keys[base + group] + cell * group_columns);
#pragma GCC unroll 8
        for (int row = 0; row < tile_rows; ++row) {
          const std::uint32_t a = cell_at(queries[first + row] + cell);
#pragma GCC unroll 8
          for (int group = 0; group < groups; ++group) multiply_cell<Element>(sums[row][group], a, keys[group]);
        }
      }
#pragma GCC unroll 8
      for (int row = 0; row < tile_rows; ++row) {
#pragma GCC unroll 8
        for (int group = 0; group < groups; ++group) {
          store(sums[row][group], scores + (first + row) * attention_tile + (base + group) * group_columns);
        }
      }
    }
  });
}

/// Running softmax of one row.
struct RowState {
  float largest;
  float sum;
  float rescale;  // of what was summed before the current tile
};

/// Turns one row's raw scores into weights; positions at or past limit get exactly zero.
template <class Element>
HWY_INLINE void softmax_row(RowState& state, const float* scores, float scale, std::int32_t limit,
                            typename Element::Stored* weights) {
  const Float d;
  const float lowest = -std::numeric_limits<float>::infinity();
  Group values[tile_groups];
#pragma GCC unroll 8
  for (int group = 0; group < tile_groups; ++group) {
    values[group] = multiply(load(scores + group * group_columns), splat(scale));
    if ((group + 1) * group_columns > limit) {
      values[group] = make_group([&](int i) HWY_ATTR {
        const auto position = hn::Iota(d, static_cast<float>(group * group_columns + i * lanes));
        const auto live = hn::Lt(position, hn::Set(d, static_cast<float>(limit)));
        return hn::IfThenElse(live, values[group].v[i], hn::Set(d, lowest));
      });
    }
  }
  const float tile_largest = max_of(max(max(values[0], values[1]), max(values[2], values[3])));
  const float largest = state.largest > tile_largest ? state.largest : tile_largest;
  state.rescale = exp_of(state.largest - largest);
  state.largest = largest;
  const Group base = splat(-largest);
#pragma GCC unroll 8
  for (int group = 0; group < tile_groups; ++group) {
    values[group] = exp_of(add(values[group], base));
    store_elements(values[group], weights + group * group_columns);
  }
  state.sum = state.sum * state.rescale + sum_of(add(add(values[0], values[1]), add(values[2], values[3])));
}

template <bool Tail>
HWY_INLINE CellGroup load_value_cells(const std::uint32_t* from, std::int32_t live) {
  if constexpr (!Tail) return load_cells(from);
  CellGroup out;
  const Unsigned du;
  std::uint32_t cells[16] = {};
  for (std::int32_t i = 0; i < live; ++i) cells[i] = from[i];
  for (int i = 0; i < vectors; ++i) out.v[i] = hn::LoadU(du, cells + i * lanes);
  return out;
}

/// sums(row, Groups of the head) = sums * rescale + weights(row, limit) . values. All rows share limit.
template <class Element, int Groups, bool Tail>
HWY_INLINE void weigh_values(const CacheTile& tile, std::int32_t head_size, std::int32_t first_group, const RowState* states,
                             const std::uint32_t* weights, std::int32_t rows, std::int32_t limit, float* sums,
                             std::int32_t sums_stride) {
  constexpr std::int32_t pack = per_cell<Element>;
  constexpr std::int32_t weights_stride = attention_tile / pack;
  constexpr std::int32_t block_cells_max = kv_block_tokens / pack;
  const std::int32_t live = head_size - first_group * group_columns;  // only of interest to Tail
  for_row_tiles(rows, [&](std::int32_t first, auto constant) HWY_ATTR {
    constexpr int tile_rows = decltype(constant)::value;
    Group acc[tile_rows][Groups];
    float* at = sums + first * sums_stride + first_group * group_columns;
#pragma GCC unroll 8
    for (int row = 0; row < tile_rows; ++row) {
#pragma GCC unroll 8
      for (int group = 0; group < Groups; ++group) {
        acc[row][group] = multiply(load(at + row * sums_stride + group * group_columns), splat(states[first + row].rescale));
      }
    }
    const std::uint32_t* weight = weights + first * weights_stride;
    const auto step = [&](const std::uint32_t* values, std::int32_t cell, std::uint32_t mask) HWY_ATTR {
      CellGroup b[Groups];
#pragma GCC unroll 8
      for (int group = 0; group < Groups; ++group) {
        b[group] = load_value_cells<Tail>(values + group * group_columns, live);
        if (mask != ~0U) {
          for (int i = 0; i < vectors; ++i) b[group].v[i] = hn::And(b[group].v[i], hn::Set(Unsigned(), mask));
        }
      }
#pragma GCC unroll 8
      for (int row = 0; row < tile_rows; ++row) {
        const std::uint32_t a = cell_at(weight + row * weights_stride + cell);
#pragma GCC unroll 8
        for (int group = 0; group < Groups; ++group) multiply_cell<Element>(acc[row][group], a, b[group]);
      }
    };
    const std::int32_t whole = limit / pack;
    for (std::int32_t block = 0; block * block_cells_max < whole; ++block) {
      const std::uint32_t* values = tile.values[block] + first_group * group_columns;
      const std::int32_t begin = block * block_cells_max;
      const std::int32_t end = whole < begin + block_cells_max ? whole : begin + block_cells_max;
      for (std::int32_t cell = begin; cell < end; ++cell) step(values + (cell - begin) * head_size, cell, ~0U);
    }
    if (limit % pack != 0) {
      // The second token of the last pair may never have been written: its weight is zero, but zero times NaN is not.
      const std::uint32_t* values = tile.values[whole / block_cells_max] + first_group * group_columns;
      step(values + (whole % block_cells_max) * head_size, whole, 0x0000FFFFU);
    }
#pragma GCC unroll 8
    for (int row = 0; row < tile_rows; ++row) {
#pragma GCC unroll 8
      for (int group = 0; group < Groups; ++group) store(acc[row][group], at + row * sums_stride + group * group_columns);
    }
  });
}

template <class Element>
HWY_INLINE void weigh_head(const CacheTile& tile, std::int32_t head_size, const RowState* states, const std::uint32_t* weights,
                           std::int32_t rows, std::int32_t limit, float* sums, std::int32_t sums_stride) {
  constexpr int wide = lanes == 16 ? 4 : 2;
  const std::int32_t whole = head_size / group_columns;
  std::int32_t group = 0;
  for (; group + wide <= whole; group += wide) {
    weigh_values<Element, wide, false>(tile, head_size, group, states, weights, rows, limit, sums, sums_stride);
  }
  for (; group < whole; ++group) {
    weigh_values<Element, 1, false>(tile, head_size, group, states, weights, rows, limit, sums, sums_stride);
  }
  if (head_size % group_columns != 0) {
    weigh_values<Element, 1, true>(tile, head_size, group, states, weights, rows, limit, sums, sums_stride);
  }
}

template <class Element>
HWY_INLINE void attend_tile(const AttentionTask& task, std::int32_t base, const std::uint32_t* const* queries, RowState* states) {
  constexpr std::int32_t pack = per_cell<Element>;
  constexpr std::int32_t weights_stride = attention_tile / pack;
  const HeadLayout& layout = task.layout;
  const std::int32_t last = task.position + task.tokens - 1;
  CacheTile tile;
  for (int block = 0; block < tile_blocks; ++block) {
    // Blocks past the last token do not exist; the first stands in, since every one of its scores is masked there.
    const std::int32_t at = base + block * kv_block_tokens;
    const std::int32_t index = (at <= last ? at : base) / kv_block_tokens;
    tile.keys[block] = task.cache + task.blocks[index].value * layout.block_stride + task.kv_head * layout.head_stride;
    tile.values[block] = tile.keys[block] + layout.value_offset;
  }
  const std::int32_t sums_stride = (layout.head_size + group_columns - 1) / group_columns * group_columns;
  const std::int32_t heads = task.head_count;
  const std::int32_t first_token = base > task.position ? base - task.position : 0;  // earlier ones ended before this tile
  const std::int32_t first = first_token * heads;
  const std::int32_t rows = task.tokens * heads;
  score_tile<Element>(tile, layout.head_size / pack, queries + first, rows - first, task.scratch.scores + first * attention_tile);
  const float scale = 1.0F / std::sqrt(static_cast<float>(layout.head_size));
  const auto limit_of = [&](std::int32_t token) {
    const std::int32_t limit = task.position + token + 1 - base;
    return limit < attention_tile ? limit : attention_tile;
  };
  for (std::int32_t row = first; row < rows; ++row) {
    auto* weights = reinterpret_cast<typename Element::Stored*>(task.scratch.weights + row * weights_stride);
    softmax_row<Element>(states[row], task.scratch.scores + row * attention_tile, scale, limit_of(row / heads), weights);
  }
  for (std::int32_t token = first_token; token < task.tokens;) {
    const std::int32_t limit = limit_of(token);
    const std::int32_t count = limit == attention_tile ? task.tokens - token : 1;  // all that see the whole tile go together
    const std::int32_t row = token * heads;
    weigh_head<Element>(tile, layout.head_size, states + row, task.scratch.weights + row * weights_stride, count * heads, limit,
                        task.scratch.sums + row * sums_stride, sums_stride);
    token += count;
  }
}

template <class Element>
void attention(const AttentionTask& task) {
  using Stored = typename Element::Stored;
  const std::int32_t size = task.layout.head_size;
  const std::int32_t sums_stride = (size + group_columns - 1) / group_columns * group_columns;
  const std::int32_t rows = task.tokens * task.head_count;
  const std::uint32_t* queries[attention_rows_max];
  RowState states[attention_rows_max];
  for (std::int32_t row = 0; row < rows; ++row) {
    const std::int64_t column = static_cast<std::int64_t>(task.first_head + row % task.head_count) * size;
    const auto* query = static_cast<const Stored*>(task.query) + (row / task.head_count) * task.query_stride + column;
    queries[row] = reinterpret_cast<const std::uint32_t*>(query);
    states[row] = {.largest = -std::numeric_limits<float>::infinity(), .sum = 0.0F, .rescale = 0.0F};
  }
  std::memset(task.scratch.sums, 0, static_cast<std::size_t>(rows * sums_stride) * sizeof(float));
  for (std::int32_t base = 0; base < task.position + task.tokens; base += attention_tile) {
    attend_tile<Element>(task, base, queries, states);
  }
  for (std::int32_t row = 0; row < rows; ++row) {
    const std::int64_t column = static_cast<std::int64_t>(task.first_head + row % task.head_count) * size;
    auto* HWY_RESTRICT out = static_cast<Stored*>(task.out) + (row / task.head_count) * task.out_stride + column;
    const float* HWY_RESTRICT sums = task.scratch.sums + row * sums_stride;
    const float inverse = 1.0F / states[row].sum;
    for (std::int32_t i = 0; i < size; ++i) out[i] = round_element(sums[i] * inverse, Stored());
  }
}

template <class Element>
void fill_table(Kernels* out) {
  out->panel_columns = panel_groups * group_columns;
  out->elements_per_cell = per_cell<Element>;
  out->linear = linear<Element, false>;
  out->linear_swiglu = linear<Element, true>;
  out->norm = norm<Element>;
  out->rope = rope<Element>;
  out->attention = attention<Element>;
}

}  // namespace HWY_NAMESPACE
}  // namespace rubato::engine::cpu::RUBATO_KERNEL_SPACE
#if RUBATO_BFLOAT16_DOT
#pragma GCC pop_options
#endif
HWY_AFTER_NAMESPACE();
