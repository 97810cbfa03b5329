#pragma once
// Host memory that the GPU's copy engines reach at full speed: shared mappings of this process,
// registered with CUDA in slices by a few threads in the background, since a pool of a hundred GB takes
// seconds. A copy asks for its bytes first (`need`) and waits for their slices alone, which are pinned before all others: the first layer works while the last is being pinned. No
// copy may cross from a slice into the next (`run`). Called by the host thread of the device only.

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "common/units.h"

namespace poise {

class PinnedHost {
 public:
  PinnedHost() = default;
  ~PinnedHost();
  PinnedHost(const PinnedHost&) = delete;
  PinnedHost& operator=(const PinnedHost&) = delete;

  static constexpr std::size_t kSlice = std::size_t{256} << 20;

  // Begins. A part's slices are of kSlice bytes, its last of what is left. Slices that
  // `need` waits for are pinned first, then those of the latest call, in the order of addresses.
  void pin(std::span<const std::span<std::byte>> parts, bool read_only);
  // Waits until these bytes are pinned, as far as they lie in a part. Fails (Exit::interrupted) where
  // the machine does not let this much be pinned.
  void need(const void* begin, Bytes size) {
    if (waiting_.load(std::memory_order_acquire) > 0) {
      wait_for(static_cast<const std::byte*>(begin), size);
    }
  }
  // How far a copy that begins here goes at once.
  struct Run {
    Bytes size;
    bool begins_slice;
  };
  Run run(const void* begin, Bytes size) const;
  // Waits for what is under way of it. The process's tables hold its pages no more, until it touches
  // them. REQUIRES: parts that `pin` was given.
  void unpin(std::span<const std::span<std::byte>> parts);

  // Of all parts, pinned or yet to be.
  Bytes bytes() const { return bytes_; }

 private:
  struct Batch;
  enum class State : std::uint8_t { waits, in_work, pinned, not_pinned };
  struct Slice {
    std::span<std::byte> memory;
    std::shared_ptr<Batch> batch;
    State state = State::waits;
  };
  using Slices = std::vector<std::shared_ptr<Slice>>;

  void work();
  void wait_for(const std::byte* begin, Bytes size);

  struct Part {
    std::span<std::byte> memory;
    Slices slices;
  };
  // The part that has a byte at or in front of this one; its end may lie in front, too.
  std::map<const std::byte*, Part>::const_iterator part_before(const std::byte* at) const;

  std::map<const std::byte*, Part> parts_;  // by the beginning of each
  Bytes bytes_{};
  std::atomic<std::int64_t> waiting_{
      0};  // slices that are not pinned yet; at least 1 after a failure

  std::mutex mutex_;  // of what follows, and of the slices' states
  std::condition_variable more_, moved_;
  std::deque<std::shared_ptr<Slice>> queue_;
  std::string failure_;
  bool ends_ = false;
  std::vector<std::jthread> helpers_;
};

}  // namespace poise
