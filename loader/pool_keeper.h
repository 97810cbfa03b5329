#pragma once
// Makes the block pool and its partition as planners ask for them. There is one pool at a time. A claim
// gives up the earlier pool (its planner is gone, or wants another), then makes the new one in a
// thread; `advance` returns the answer when the pool is there, and its memory is made behind the work that has begun in it
// (`pool_standing`). Only the loader's one thread calls this class, and only this class writes the control segment's
// pool fields; the thread that makes memory writes `pool_standing`.
//
// A pool that is given up is spare: its memory stays for the next claim, whatever size that has, unless an executor still
// has it mapped then. So the next run of a kept loader need not wait for pages. Weights that need the room come first.

#include <atomic>
#include <functional>
#include <future>
#include <memory>
#include <optional>
#include <string>

#include "common/messages_generated.h"
#include "common/shared_memory.h"
#include "loader/blocks_segment.h"
#include "loader/host_budget.h"

namespace poise {

struct PoolWish {
  PoolPartition partition{};
  KvFormat kv_format = KvFormat::plain;
  bool stands = false;  // all its memory is there …
  bool moved = false;   // … or as much as before
};

class PoolKeeper {
 public:
  // `control` outlives it; its shape and dtype are written already. `available`: the machine's memory, now.
  PoolKeeper(Control& control, const HostBudget& budget, std::function<Bytes()> available);
  ~PoolKeeper();
  PoolKeeper(const PoolKeeper&) = delete;
  PoolKeeper& operator=(const PoolKeeper&) = delete;

  // Adopts what an ended loader left: the pool in the control segment, if any. What that loader was making
  // is removed.
  void adopt();
  // The pool stays for a successor. REQUIRES: not busy.
  void leave();
  // Looks whether a spare pool is unused by now, and publishes its bytes then.
  void look_at_spare();
  // Gives a spare pool's memory back; false if there is none.
  bool drop_spare();
  // Removes the pool's name; its memory is given back on destruction.
  void unlink();
  // `host_memory`: the claiming run's cap, weights included; nothing: the loader's own.
  void claim(const PoolWish& wish, std::optional<Bytes> host_memory);
  // The planner that claimed is gone: drops the answer to its claim.
  void forget_claim();
  messages::PoolGrantT move_border(std::uint32_t act_blocks, std::uint32_t kv_blocks);
  messages::PoolGrantT release();
  // The answer to a claim, once it is ready. Fails (Exit::interrupted) if a granted pool's memory cannot be had.
  std::optional<messages::PoolGrantT> advance();
  // A granted pool's memory is being made.
  bool is_growing() const { return growing_.valid(); }
  bool busy() const { return claimed_.has_value() || coming_.valid(); }
  bool there() const { return blocks_ != nullptr; }
  // Weights that are not in host memory: a pool may use their room.
  void set_released(Bytes weights) { released_ = weights; }
  // Why `bytes` do not fit beside the present weights and pool; nothing if they fit.
  std::optional<std::string> why_no_room(Bytes bytes) const;

 private:
  std::optional<messages::PoolGrantT> begin();
  messages::PoolGrantT finish();
  void begin_growing();
  void stop_growing();
  void give_up();
  messages::PoolGrantT grant() const;
  std::string name_of(std::uint64_t epoch) const;
  Bytes weights() const;
  void publish(std::uint64_t epoch, const PoolWish& pool);
  BlockSizes sizes(KvFormat format) const;

  Control& control_;
  HostBudget budget_;
  std::function<Bytes()> available_;
  Bytes released_{};
  std::int32_t layers_;
  std::optional<PoolWish> claimed_;  // waits to be begun
  std::optional<Bytes> asked_;       // cap of the last claim
  PoolWish making_;
  bool wanted_ = false;  // what is being made
  std::atomic<bool> stop_{false};
  std::future<std::unique_ptr<BlocksSegment>> coming_;
  std::unique_ptr<BlocksSegment> blocks_;
  std::future<void> growing_;
  std::unique_ptr<BlocksSegment> spare_;  // of the newest epoch; never beside another
};

}  // namespace poise
