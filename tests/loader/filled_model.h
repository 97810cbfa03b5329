#pragma once
// A model's weight segment as a loader fills it.

#include <gtest/gtest.h>

#include <atomic>
#include <thread>
#include <vector>

#include "loader/model_on_disk.h"
#include "loader/weight_fill.h"

namespace poise::testing_support {

inline std::vector<std::byte> filled(const ModelOnDisk& model) {
  std::vector<std::byte> segment(static_cast<std::size_t>(model.layout.total().n));
  std::atomic<std::uint64_t> bytes{0};
  WeightFill fill(*model.source, segment, 2, bytes);
  while (!fill.done()) {
    std::this_thread::yield();
  }
  EXPECT_EQ(static_cast<std::int64_t>(bytes.load()), fill.total().n);
  return segment;
}

}  // namespace poise::testing_support
