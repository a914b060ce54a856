// SPDX-License-Identifier: Apache-2.0
// What works on one row at a time: norms, rope, writing keys and values to the cache.
// Part of kernels.inl, which includes it inside the namespace of one instruction set.

template <class Element>
void norm(const NormTask& task) {
  // Four chains hide the latency of the sum; they join in one fixed order.
  Group squares[4] = {splat(0.0F), splat(0.0F), splat(0.0F), splat(0.0F)};
  for (std::int32_t group = 0; group < task.groups; ++group) {
    float* x = task.x + group * group_columns;
    Group value = load(x);
    if (task.delta != nullptr) {
      value = multiply_add(load(task.delta + group * group_columns), splat(task.delta_scale), value);
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
