// SPDX-License-Identifier: Apache-2.0
// Attention over the paged cache, tile by tile at absolute positions.
// Part of kernels.inl, which includes it inside the namespace of one instruction set.

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
  const auto limit_of = [&](std::int32_t token) {
    const std::int32_t limit = task.position + token + 1 - base;
    return limit < attention_tile ? limit : attention_tile;
  };
  for (std::int32_t row = first; row < rows; ++row) {
    auto* weights = reinterpret_cast<typename Element::Stored*>(task.scratch.weights + row * weights_stride);
    softmax_row<Element>(states[row], task.scratch.scores + row * attention_tile, task.scale, limit_of(row / heads), weights);
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
