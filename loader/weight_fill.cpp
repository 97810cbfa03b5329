#include "loader/weight_fill.h"

#include <algorithm>

#include "common/testing/failpoint.h"
#include "common/trouble.h"

namespace poise {

std::int64_t units_of_a_leaf(const WeightTensor& tensor) {
  return std::max<std::int64_t>(1, kDigestLeaf / tensor.unit);
}

std::size_t fill_threads() {
  return std::clamp<std::size_t>(std::thread::hardware_concurrency(), 2, 64);
}

WeightFill::WeightFill(const WeightSource& source, std::span<std::byte> segment,
                       std::size_t threads, std::atomic<std::uint64_t>& loaded,
                       const std::function<bool(std::uint32_t slab)>& wanted,
                       std::vector<Digest> leaves)
    : source_(source),
      segment_(segment),
      loaded_(loaded),
      leaves_(std::move(leaves)),
      known_(!leaves_.empty()) {
  cut_into_tasks(wanted);
  for (std::size_t i = 0; i < threads; ++i) {
    threads_.emplace_back([this] { work(); });
  }
}

WeightFill::~WeightFill() {
  stop_ = true;
  for (std::thread& thread : threads_) {
    thread.join();
  }
}

void WeightFill::cut_into_tasks(const std::function<bool(std::uint32_t slab)>& wanted) {
  std::uint32_t leaves = 0;
  for (std::uint32_t number = 0; number < source_.tensors().size(); ++number) {
    const WeightTensor& tensor = source_.tensors()[number];
    const std::int64_t leaf = units_of_a_leaf(tensor);
    const auto bytes = static_cast<std::uint64_t>((tensor.unit * tensor.units).n);
    check(tensor.offset + bytes <= segment_.size(), "a tensor lies in the weight segment");
    const bool fills = !wanted || wanted(tensor.slab);
    total_.n += fills ? static_cast<std::int64_t>(bytes) : 0;
    for (std::int64_t first = 0; first < tensor.units; first += 2 * leaf) {
      const std::int64_t count = std::min(2 * leaf, tensor.units - first);
      if (fills) {
        tasks_.push_back({.tensor = number, .leaf = leaves, .first = first, .count = count});
      }
      leaves += static_cast<std::uint32_t>(ceil_div(count, leaf));
    }
  }
  check(!known_ || leaves_.size() == leaves, "leaves are of the same model");
  leaves_.resize(leaves);
}

void WeightFill::work() {
  try {
    while (!stop_) {
      const std::size_t number = next_++;
      if (number >= tasks_.size()) {
        return;
      }
      fill(tasks_[number]);
      if (++filled_ == tasks_.size()) {  // the last one sees what all others wrote
        if (!known_) {
          source_.check_after(segment_);
        }
        checked_ = true;
      }
    }
  } catch (const Failure& failure) {
    const bool changed =
        known_ && (failure.code() == Exit::cannot_start || failure.code() == Exit::unpackable);
    give_up(changed ? std::make_exception_ptr(Failure(failure.what(), Exit::foreign))
                    : std::current_exception());
  } catch (...) {
    give_up(std::current_exception());
  }
}

void WeightFill::give_up(std::exception_ptr why) {
  stop_ = true;
  const std::lock_guard lock(failure_mutex_);
  failure_ = failure_ ? failure_ : std::move(why);
}

void WeightFill::fill(const Task& task) {
  const WeightTensor& tensor = source_.tensors()[task.tensor];
  const auto unit = static_cast<std::size_t>(tensor.unit.n);
  const std::size_t begin = tensor.offset + static_cast<std::size_t>(task.first) * unit;
  const std::span<std::byte> out =
      segment_.subspan(begin, static_cast<std::size_t>(task.count) * unit);
  source_.fill(task.tensor, task.first, out);
  failpoint("loader.weight_copy");
  const std::size_t leaf = static_cast<std::size_t>(units_of_a_leaf(tensor)) * unit;
  if (out.size() == 2 * leaf) {
    const std::array<Digest, 2> pair = sha256_pair(out.first(leaf), out.last(leaf));
    keep(task, task.leaf, pair[0]);
    keep(task, task.leaf + 1, pair[1]);
  } else {
    const std::size_t first = std::min(leaf, out.size());
    keep(task, task.leaf, sha256(out.first(first)));
    if (out.size() > first) {
      keep(task, task.leaf + 1, sha256(out.subspan(first)));
    }
  }
  loaded_.fetch_add(out.size(), std::memory_order_release);
}

void WeightFill::keep(const Task& task, std::uint32_t leaf, const Digest& digest) {
  if (known_ && leaves_[leaf] != digest) {
    fail(Exit::foreign,
         "tensor {} has other bytes than when it was first read: the model's files changed",
         source_.tensors()[task.tensor].name);
  }
  leaves_[leaf] = digest;
}

bool WeightFill::done() {
  {
    const std::lock_guard lock(failure_mutex_);
    if (failure_) {
      std::rethrow_exception(failure_);
    }
  }
  return checked_;
}

Digest WeightFill::digest() const {
  check(checked_, "a digest is taken of weights that are all there");
  return root_of(leaves_);
}

Digest root_of(std::span<const Digest> leaves) { return sha256(std::as_bytes(leaves)); }

}  // namespace poise
