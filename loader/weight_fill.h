#pragma once
// Fills the weight segment from a source with all cores, in the order the DMA will read it, and
// takes the digest of what it wrote while it is still in the cache: a tree, its leaves 512 KiB of one
// tensor each, its root over all leaves in order. The digest depends on the bytes and their layout,
// not on threads or on how the checkpoint was split. The threads run from construction to
// destruction, which waits for them (each ends after its current piece).

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
#include "loader/weight_source.h"

namespace poise {

inline constexpr Bytes kDigestLeaf = kKiB * 512;

class WeightFill {
 public:
  // `source` and `segment` outlive it. `loaded` counts bytes as they arrive. With `wanted`, only the
  // slabs (0: outer, 1 + l: layer l) for which it says so are filled, and all leaves must be given …
  WeightFill(const WeightSource& source, std::span<std::byte> segment, DType dtype,
             std::size_t threads, std::atomic<std::uint64_t>& loaded,
             const std::function<bool(std::uint32_t slab)>& wanted = nullptr,
             std::vector<Digest> leaves = {});
  ~WeightFill();
  WeightFill(const WeightFill&) = delete;
  WeightFill& operator=(const WeightFill&) = delete;

  // Whether every byte is there and checked; throws what a thread failed with.
  bool done();
  // The root. REQUIRES: done().
  Digest digest() const;
  // … of which each filled one must come out the same again; `done` fails (Exit::foreign) where one does
  // not, or cannot be read. REQUIRES: done().
  std::vector<Digest> take_leaves() { return std::move(leaves_); }
  Bytes total() const { return total_; }

 private:
  // A piece of a tensor: at most two leaves.
  struct Piece {
    std::uint32_t tensor;
    std::uint32_t leaf;  // number of its first leaf
    std::int64_t first;  // element
    std::int64_t count;
  };
  void cut_into_pieces(const std::function<bool(std::uint32_t slab)>& wanted);
  void work();
  void give_up(std::exception_ptr why);
  void fill(const Piece& piece);
  void keep(const Piece& piece, std::uint32_t leaf, const Digest& digest);

  const WeightSource& source_;
  std::span<std::byte> segment_;
  std::size_t element_;
  std::atomic<std::uint64_t>& loaded_;
  Bytes total_{};
  std::vector<Piece> pieces_;
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

// As many as there are cores, and a few more than one where there are few: reading waits.
std::size_t fill_threads();

}  // namespace poise
