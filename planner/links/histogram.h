#pragma once
// How often values fell between bounds, as Prometheus counts them. A value type.

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "common/files/json.h"

namespace poise {

class Histogram {
 public:
  // `bounds` rise; a value belongs to the first one that is not below it, or beyond all.
  explicit Histogram(std::vector<double> bounds)
      : bounds_(std::move(bounds)), counts_(bounds_.size() + 1) {}

  void observe(double value) {
    ++counts_[static_cast<std::size_t>(std::ranges::lower_bound(bounds_, value) - bounds_.begin())];
    sum_ += value;
  }

  // {"bounds", "counts" (one more), "sum"}.
  nlohmann::ordered_json json() const {
    return {{"bounds", bounds_}, {"counts", counts_}, {"sum", sum_}};
  }

 private:
  std::vector<double> bounds_;
  std::vector<std::uint64_t> counts_;
  double sum_ = 0;
};

// vLLM's bounds.
inline Histogram tokens_of_iterations() {
  return Histogram({1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384});
}
inline Histogram seconds_between_tokens() {
  return Histogram({0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10,
                    20, 40, 80});
}

}  // namespace poise
