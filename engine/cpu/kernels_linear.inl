// SPDX-License-Identifier: Apache-2.0
// Activations times one panel of weights.
// Part of kernels.inl, which includes it inside the namespace of one instruction set.

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
