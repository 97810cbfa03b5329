#pragma once
// The planner's side of the connection to the loader: says Hello, claims a block pool, and moves the
// border between its kinds. A step blocks no longer than its timeout; one thread. A loader may end and a
// successor adopt its segments: the link then says Hello again and asks once more for what was not
// answered. It fails if it needs an answer and no loader comes back within ten seconds.

#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "common/blocks.h"
#include "common/channel.h"
#include "planner/policies/policy.h"

namespace poise {

class LoaderLink {
 public:
  struct Grant {
    std::uint64_t pool_epoch;
    PoolPartition partition;
  };

  // Sends `hello` to each loader that comes. `host_memory`: this run's cap; the loader may have been
  // started with another run's. `kv_format`: of the pools that are claimed.
  LoaderLink(std::unique_ptr<Channel> channel, messages::HelloT hello,
             std::optional<Bytes> host_memory, KvFormat kv_format);

  // Handles what has arrived, waiting at most `timeout`. True if something did. Fails with the loader's
  // sentence if it refuses the claim.
  bool step(Seconds timeout);
  // A loader has answered Hello. It may have ended since.
  bool greeted() const { return greeted_; }
  // In place of the pool of an earlier claim, if any. REQUIRES: greeted().
  void claim(std::uint64_t region_bytes, const Allocation& host);
  const std::optional<Grant>& grant() const { return grant_; }
  // Takes over the existing pool of an earlier planner, instead of a claim.
  void take_over(const Grant& grant) { grant_ = grant; }
  void forget_grant() { grant_.reset(); }
  // Moves the border of the granted pool; settled() once it is in its place, and grant() then has the
  // new partition. REQUIRES: granted, settled(); no iteration is under way.
  void move_border(std::uint32_t act_blocks, std::uint32_t kv_blocks);
  bool settled() const { return !moving_; }
  // Gives the pool back; `left_over`: also a pool that another planner claimed. gives_back() is true
  // until the loader has answered this and all earlier messages.
  void release(bool left_over = false);
  bool gives_back() const { return releases_ > 0; }
  // Removes weights that a device holds from the host, or restores all weights there. Done once nothing
  // is asked for any more; a step fails if the loader refuses. REQUIRES: greeted().
  void release_weights(std::int32_t resident_layers);
  void restore_weights();
  bool asked_for_weights() const { return weights_.has_value(); }
  // Asks whether the weights are what they were when they were loaded (messages.fbs), in place of an earlier question.
  // REQUIRES: greeted().
  void check_weights(bool at_once);
  // The answer; once.
  std::optional<messages::WeightsCheckedT> take_checked() {
    return std::exchange(checked_, std::nullopt);
  }

 private:
  // Whether the present connection's loader has answered Hello.
  bool listens() const { return greeted_on_ != 0 && greeted_on_ == channel_->connections(); }
  bool awaits_anything() const {
    return claiming_ || moving_ || releases_ > 0 || weights_ || (check_ && check_->at_once);
  }
  void greet();
  void ask_again();
  void take(const messages::PoolGrant& grant);
  template <typename Table>
  void ask(Table&& table);

  std::unique_ptr<Channel> channel_;
  const messages::HelloT hello_;
  std::uint64_t said_hello_on_ = 0;  // connection, from 1
  std::uint64_t greeted_on_ = 0;     // likewise
  bool greeted_ = false;
  std::optional<Seconds> deaf_since_;  // no loader listens, and an answer is awaited
  messages::PoolClaimT claim_;
  std::optional<Grant> grant_;
  bool claiming_ = false, moving_ = false;  // not answered yet
  int releases_ = 0;                        // likewise
  std::optional<std::int32_t> weights_;  // likewise: layers to release; 0: all are to be restored
  std::optional<messages::WeightsCheckT> check_;  // likewise
  std::uint32_t checks_ = 0;
  std::optional<messages::WeightsCheckedT> checked_;
};

}  // namespace poise
