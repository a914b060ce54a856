// SPDX-License-Identifier: Apache-2.0
#include "policies/prefix_index.h"

#include <bit>

#include "manifests/check.h"

namespace rubato::policies {

PrefixIndex::PrefixIndex(std::int32_t capacity) : capacity_(capacity) {
  CHECK(capacity >= 0, "capacity=", capacity);
  entries_.resize(std::bit_ceil(2 * static_cast<std::size_t>(capacity) + 1));
}

std::size_t PrefixIndex::home_of(const BlockHash& hash) const {
  return static_cast<std::size_t>(hash.low) & (entries_.size() - 1);
}

// Where the hash is, or the free entry where it would be.
std::size_t PrefixIndex::place_of(const BlockHash& hash) const {
  std::size_t place = home_of(hash);
  while (entries_[place].used && entries_[place].hash != hash) place = (place + 1) & (entries_.size() - 1);
  return place;
}

std::optional<std::int32_t> PrefixIndex::find(const BlockHash& hash) const {
  const Entry& entry = entries_[place_of(hash)];
  return entry.used ? std::optional(entry.value) : std::nullopt;
}

void PrefixIndex::insert(const BlockHash& hash, std::int32_t value) {
  Entry& entry = entries_[place_of(hash)];
  CHECK(!entry.used && size_ < capacity_, "used=", entry.used, " size=", size_, " capacity=", capacity_);
  entry = {.hash = hash, .value = value, .used = true};
  ++size_;
}

// Those behind that could not have the freed entry's place move up, so that no search ends too early.
void PrefixIndex::erase(const BlockHash& hash) {
  std::size_t hole = place_of(hash);
  CHECK(entries_[hole].used);
  const std::size_t mask = entries_.size() - 1;
  for (std::size_t next = (hole + 1) & mask; entries_[next].used; next = (next + 1) & mask) {
    const std::size_t home = home_of(entries_[next].hash);
    if (((next - home) & mask) < ((next - hole) & mask)) continue;
    entries_[hole] = entries_[next];
    hole = next;
  }
  entries_[hole].used = false;
  --size_;
}

void PrefixIndex::check_integrity() const {
  std::int32_t used = 0;
  for (std::size_t place = 0; place < entries_.size(); ++place) {
    if (!entries_[place].used) continue;
    ++used;
    CHECK(place_of(entries_[place].hash) == place, "the entry at ", place, " is not found");
  }
  CHECK(used == size_, "used=", used, " size=", size_);
}

}  // namespace rubato::policies
