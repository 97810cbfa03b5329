#include "loader/weight_check.h"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "common/trouble.h"
#include "loader/weight_fill.h"

namespace poise {
namespace {

// 2 to 3 ms of a core, or 100 ms of a machine: then messages are looked for.
constexpr Bytes kALittle = kMiB * 4;
constexpr Bytes kMuch = kMiB * 256;

struct LeafInMemory {
  std::uint32_t leaf;
  const WeightTensor* tensor;
  std::size_t begin, bytes;  // within the segment
};

}  // namespace

void WeightCheck::begin(std::uint32_t serial, bool at_once) {
  serial_ = serial;
  at_once_ = at_once;
  tensor_ = 0;
  first_ = 0;
  leaf_ = 0;
  damage_.clear();
}

std::optional<messages::WeightsCheckedT> WeightCheck::advance() {
  if (!serial_ || !weights_.sealed()) {
    return std::nullopt;
  }
  try {
    if (check_some(weights_.filled())) {
      return std::nullopt;
    }
  } catch (const Failure& failure) {
    return ended({}, failure.what());
  }
  return ended(std::exchange(damage_, {}));
}

// False once all is checked, or something is damaged.
bool WeightCheck::check_some(const FilledWeights& filled) {
  const Bytes most = at_once_ ? kMuch : kALittle;
  std::vector<LeafInMemory> some;
  Bytes bytes{};
  while (tensor_ < filled.source.tensors().size() && bytes < most) {
    const WeightTensor& tensor = filled.source.tensors()[tensor_];
    const std::int64_t unit = tensor.unit.n;
    const std::int64_t count = std::min(units_of_a_leaf(tensor), tensor.units - first_);
    if (weights_.holds(tensor.slab)) {
      some.push_back({.leaf = leaf_,
                      .tensor = &tensor,
                      .begin = tensor.offset + static_cast<std::size_t>(first_ * unit),
                      .bytes = static_cast<std::size_t>(count * unit)});
      bytes += Bytes{count * unit};
    }
    ++leaf_;
    first_ += count;
    if (first_ >= tensor.units) {
      ++tensor_;
      first_ = 0;
    }
  }
  std::atomic<std::size_t> next{0};
  std::mutex mutex;
  const auto work = [&] {
    for (std::size_t at = next++; at < some.size(); at = next++) {
      const LeafInMemory& one = some[at];
      const auto bytes = filled.segment.subspan(one.begin, one.bytes);
      const bool sound = sha256(bytes) == filled.leaves[one.leaf];
      weights_.forget_pages(one.begin, {static_cast<std::int64_t>(one.bytes)});
      if (!sound) {
        const std::lock_guard lock(mutex);
        damage_ = fmt::format(
            "the weights in shared memory have changed since they were loaded: tensor {}, within {} "
            "bytes from {} of the segment on",
            one.tensor->name, one.bytes, one.begin);
      }
    }
  };
  {
    std::vector<std::jthread> others;
    for (std::size_t i = 1; at_once_ && i < fill_threads(); ++i) {
      others.emplace_back(work);
    }
    work();
  }
  return damage_.empty() && tensor_ < filled.source.tensors().size();
}

messages::WeightsCheckedT WeightCheck::ended(std::string damage, std::string why_not) {
  messages::WeightsCheckedT answer;
  answer.serial = *std::exchange(serial_, std::nullopt);
  answer.damaged = !damage.empty();
  answer.sound = !answer.damaged && why_not.empty();
  answer.sentence = answer.damaged ? std::move(damage) : std::move(why_not);
  return answer;
}

}  // namespace poise
