#pragma once
// Fills the weight segment from a source with all cores, in the order of later copies, and computes
// a digest of the bytes while they are in the cache. The digest is a tree: each leaf covers up to 512 KiB of
// one tensor, and the root covers all leaves in order. It depends on the bytes and their layout, not
// on threads or on how the checkpoint was split into files. The threads run from construction to
// destruction, which waits for them (each ends after its current task).

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <mutex>
#include <optional>
#include <span>
#include <thread>
#include <utility>
#include <vector>

#include "common/files/sha256.h"
#include "loader/sources/weight_source.h"

namespace poise {

inline constexpr Bytes kDigestLeaf = kKiB * 512;
// Whole units of at most so many bytes together, or one that is larger.
std::int64_t units_of_a_leaf(const WeightTensor& tensor);

class WeightFill {
 public:
  // `source` and `segment` outlive it. `loaded` counts bytes as they arrive. With `wanted`, only those
  // slabs are filled again (0: outer, 1 + l: layer l); `leaves` are then the digests of the first fill,
  // and `done` fails (Exit::foreign) if a leaf differs or cannot be read.
  WeightFill(const WeightSource& source, std::span<std::byte> segment, std::size_t threads,
             std::atomic<std::uint64_t>& loaded,
             const std::function<bool(std::uint32_t slab)>& wanted = nullptr,
             std::vector<Digest> leaves = {});
  ~WeightFill();
  WeightFill(const WeightFill&) = delete;
  WeightFill& operator=(const WeightFill&) = delete;

  // Whether every byte is there and checked; rethrows the failure of a thread.
  bool done();
  // The root. REQUIRES: done().
  Digest digest() const;
  // The leaves' digests, for a later fill. REQUIRES: done().
  std::vector<Digest> take_leaves() { return std::move(leaves_); }
  Bytes total() const { return total_; }

 private:
  // A part of one tensor, at most two leaves, for one thread.
  struct Task {
    std::uint32_t tensor;
    std::uint32_t leaf;  // number of its first leaf
    std::int64_t first;  // unit
    std::int64_t count;
  };
  void cut_into_tasks(const std::function<bool(std::uint32_t slab)>& wanted);
  void work();
  void give_up(std::exception_ptr why);
  void fill(const Task& task);
  void keep(const Task& task, std::uint32_t leaf, const Digest& digest);

  const WeightSource& source_;
  std::span<std::byte> segment_;
  std::atomic<std::uint64_t>& loaded_;
  Bytes total_{};
  std::vector<Task> tasks_;
  std::vector<Digest> leaves_;
  bool known_ = false;  // the leaves were given
  std::atomic<std::size_t> next_{0};
  std::atomic<std::size_t> filled_{0};
  std::atomic<bool> stop_{false};
  std::atomic<bool> checked_{false};
  std::mutex failure_mutex_;
  std::exception_ptr failure_;
  std::vector<std::thread> threads_;
};

// The digest of all weights, from their leaves'.
Digest root_of(std::span<const Digest> leaves);

// One for each core, but at least two: reading waits.
std::size_t fill_threads();

}  // namespace poise
