// SPDX-License-Identifier: Apache-2.0
// The recurrent layers: causal convolution, the scan over tokens, the gated norm; and the squared ReLU.
// Part of kernels.inl, which includes it inside the namespace of one instruction set.

/// Inputs of the token at index (negative: before the first), or null for zeros.
HWY_INLINE const float* convolve_input(const ConvolveTask& task, std::int32_t index) {
  if (index >= 0) return task.in + index * task.in_stride;
  return task.from == nullptr ? nullptr : task.from + (task.window - 1 + index) * task.taps_stride;
}

/// The inputs before token `tokens`. In place they only move towards older ones, so ascending order reads each before it is lost.
HWY_INLINE void keep_inputs(const ConvolveTask& task, std::int32_t tokens, float* to) {
  for (std::int32_t i = 0; i < task.window - 1; ++i) {
    const float* from = convolve_input(task, tokens - (task.window - 1) + i);
    float* kept = to + i * task.taps_stride;
    for (std::int32_t channel = 0; channel < task.channels; channel += group_columns) {
      store(from == nullptr ? splat(0.0F) : load_first(from + channel, task.channels - channel), kept + channel);
    }
  }
}

/// out = silu(bias + sum of taps * inputs) for the channels [first, end) of one token, whose window of inputs is in rows.
template <bool Whole>
HWY_INLINE void convolve_channels(const ConvolveTask& task, const float* const* rows, std::int32_t first, std::int32_t end,
                                  float* out) {
  for (std::int32_t channel = first; channel < end; channel += group_columns) {
    const std::int32_t live = Whole ? group_columns : end - channel;
    Group sum = load(task.bias + channel);
    for (std::int32_t tap = 0; tap < task.window; ++tap) {
      const float* in = rows[tap];
      const Group value = in == nullptr ? splat(0.0F) : load_first(in + channel, live);
      sum = multiply_add(load(task.taps + tap * task.taps_stride + channel), value, sum);
    }
    store_first(silu(sum), out + channel, live);
  }
}

inline void convolve(const ConvolveTask& task) {
  const std::int32_t whole = task.channels / group_columns * group_columns;
  for (std::int32_t token = 0; token < task.tokens; ++token) {
    const float* rows[window_max];
    for (std::int32_t tap = 0; tap < task.window; ++tap) rows[tap] = convolve_input(task, token - (task.window - 1) + tap);
    float* out = task.out + token * task.out_stride;
    convolve_channels<true>(task, rows, 0, whole, out);
    convolve_channels<false>(task, rows, whole, task.channels, out);
  }
  if (task.save != nullptr) keep_inputs(task, task.save_tokens, task.save);
  keep_inputs(task, task.tokens, task.to);
}

/// Time steps and decays of some tokens, 16 tokens at once: lanes do not meet, so each has the bits it would have alone.
HWY_INLINE void scan_time_steps(const ScanTask& task, std::int32_t first, std::int32_t tokens) {
  for (std::int32_t i = 0; i < tokens; i += group_columns) {
    float raw[group_columns] = {};
    const std::int32_t count = tokens - i < group_columns ? tokens - i : group_columns;
    for (std::int32_t j = 0; j < count; ++j) raw[j] = task.time_step[(first + i + j) * task.time_step_stride];
    const Group biased = add(load(raw), splat(task.time_step_bias));
    const Group time_step = clamp(softplus(biased), task.time_step_min, task.time_step_max);
    store(time_step, task.scratch.time_steps + i);
    store(exp_of(multiply(splat(task.rate), time_step)), task.scratch.decays + i);
  }
}

/// One lane group of elements against 16 entries of the state, which stay in registers over the tokens. Lanes are elements of the
/// head, so the sum over the state never crosses lanes: of each 16 entries four chains, which join in one order; 16 after 16.
HWY_INLINE void scan_group(const ScanScratch& scratch, const float* b, const float* c, std::int32_t tokens, const float* from,
                           float* to) {
  const Float d;
#pragma GCC unroll 1
  for (int part = 0; part < group_columns; part += lanes) {
    FloatVector state[group_columns];
#pragma GCC unroll 16
    for (int n = 0; n < group_columns; ++n) {
      state[n] = from == nullptr ? hn::Zero(d) : hn::LoadU(d, from + n * group_columns + part);
    }
    for (std::int32_t token = 0; token < tokens; ++token) {
      const std::int32_t at = token * group_columns;
      const auto decay = hn::Set(d, scratch.decays[token]);
      const auto x = hn::LoadU(d, scratch.x + at + part);
      FloatVector sums[4] = {hn::Zero(d), hn::Zero(d), hn::Zero(d), hn::Zero(d)};
#pragma GCC unroll 16
      for (int n = 0; n < group_columns; ++n) {
        state[n] = hn::MulAdd(decay, state[n], hn::Mul(x, hn::Set(d, b[at + n])));
        sums[n % 4] = hn::MulAdd(state[n], hn::Set(d, c[at + n]), sums[n % 4]);
      }
      const auto sum = hn::Add(hn::Add(sums[0], sums[1]), hn::Add(sums[2], sums[3]));
      hn::StoreU(hn::Add(hn::LoadU(d, scratch.y + at + part), sum), d, scratch.y + at + part);
    }
#pragma GCC unroll 16
    for (int n = 0; n < group_columns; ++n) hn::StoreU(state[n], d, to + n * group_columns + part);
  }
}

/// Tokens [first, first + tokens), at most scan_tokens: from the state `from` to the one in task.to.
HWY_INLINE void scan_part(const ScanTask& task, std::int32_t first, std::int32_t tokens, const float* from) {
  const ScanScratch& scratch = task.scratch;
  const std::int32_t state_groups = (task.state_size + group_columns - 1) / group_columns;
  scan_time_steps(task, first, tokens);
  for (std::int32_t group = 0; group < state_groups; ++group) {
    const std::int32_t column = group * group_columns;
    for (std::int32_t token = 0; token < tokens; ++token) {
      const std::int64_t row = (first + token) * task.stride + column;
      const std::int32_t at = (group * scan_tokens + token) * group_columns;
      store(load_first(task.b + row, task.state_size - column), scratch.b + at);
      store(load_first(task.c + row, task.state_size - column), scratch.c + at);
    }
  }
  for (std::int32_t element = 0; element < task.elements; element += group_columns) {
    const std::int32_t live = task.elements - element;
    for (std::int32_t token = 0; token < tokens; ++token) {
      const Group x = load_first(task.x + (first + token) * task.stride + element, live);
      store(multiply(x, splat(scratch.time_steps[token])), scratch.x + token * group_columns);
      store(multiply(x, splat(task.skip)), scratch.y + token * group_columns);
    }
    for (std::int32_t group = 0; group < state_groups; ++group) {
      const std::int64_t at = (static_cast<std::int64_t>(element) * state_groups + group * group_columns) * group_columns;
      const std::int32_t entries = group * scan_tokens * group_columns;
      scan_group(scratch, scratch.b + entries, scratch.c + entries, tokens, from == nullptr ? nullptr : from + at, task.to + at);
    }
    for (std::int32_t token = 0; token < tokens; ++token) {
      store_first(load(scratch.y + token * group_columns), task.out + (first + token) * task.out_stride + element, live);
    }
  }
}

inline void scan(const ScanTask& task) {
  const std::int32_t state_groups = (task.state_size + group_columns - 1) / group_columns;
  const std::int32_t element_groups = (task.elements + group_columns - 1) / group_columns;
  const float* from = task.from;
  std::int32_t token = 0;
  while (token < task.tokens) {
    std::int32_t end = token + scan_tokens < task.tokens ? token + scan_tokens : task.tokens;
    if (task.save != nullptr && token < task.save_tokens && task.save_tokens < end) end = task.save_tokens;
    scan_part(task, token, end - token, from);
    from = task.to;
    token = end;
    if (task.save != nullptr && token == task.save_tokens) {
      const std::int64_t count = static_cast<std::int64_t>(element_groups) * state_groups * group_columns * group_columns;
      std::memcpy(task.save, task.to, static_cast<std::size_t>(count) * sizeof(float));
    }
  }
}

/// 1 / sqrt(mean square) of what is in task.product.
HWY_INLINE float gated_norm_scale(const GatedNormTask& task) {
  Group squares[4] = {splat(0.0F), splat(0.0F), splat(0.0F), splat(0.0F)};
  for (std::int32_t column = 0; column < task.norm_columns; column += group_columns) {
    const Group value = load(task.product + column);
    Group& sum = squares[column / group_columns % 4];
    sum = multiply_add(value, value, sum);
  }
  const float sum = sum_of(add(add(squares[0], squares[1]), add(squares[2], squares[3])));
  return 1.0F / std::sqrt(sum / static_cast<float>(task.norm_columns) + task.epsilon);
}

template <class Element>
void gated_norm(const GatedNormTask& task) {
  auto* out = static_cast<typename Element::Stored*>(task.out);
  for (std::int32_t first = 0; first < task.columns; first += task.norm_columns) {
    for (std::int32_t column = 0; column < task.norm_columns; column += group_columns) {
      const std::int32_t live = task.norm_columns - column;
      const Group y = load_first(task.y + first + column, live);
      const bool gated = task.order != GateOrder::NormFirst;
      store(gated ? multiply(y, silu(load_first(task.gate + first + column, live))) : y, task.product + column);
    }
    const Group scale = splat(task.order == GateOrder::GateOnly ? 1.0F : gated_norm_scale(task));
    for (std::int32_t column = 0; column < task.norm_columns; column += group_columns) {
      const std::int32_t live = task.norm_columns - column;
      Group value = load(task.product + column);
      if (task.order != GateOrder::GateOnly) {
        value = multiply(multiply(value, scale), load_first(task.weight + first + column, live));
      }
      if (task.order == GateOrder::NormFirst) value = multiply(value, silu(load_first(task.gate + first + column, live)));
      store_first(value, out + first + column, live);
    }
  }
}

template <class Element>
void relu_squared(const ReluSquaredTask& task) {
  auto* out = static_cast<typename Element::Stored*>(task.out);
  for (std::int32_t group = 0; group < task.groups; ++group) {
    const Group x = load(task.x + group * group_columns);
    // Written so that NaN stays.
    const Group positive = make_group([&](int i) HWY_ATTR {
      return hn::IfThenElse(hn::Lt(x.v[i], hn::Zero(Float())), hn::Zero(Float()), x.v[i]);
    });
    store_elements(multiply(positive, positive), out + group * group_columns);
  }
}
