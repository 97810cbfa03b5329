#pragma once
// The planner's side of the talk with the loader: it greets, claims a block pool, is granted one, and
// moves the border between its kinds. Steps do not block longer than they are told; one thread.

#include <memory>
#include <optional>
#include <string>

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

  // `hello` is said as soon as the loader is there. `host_memory`: this run's cap, whatever the loader
  // was started with for another.
  LoaderLink(std::unique_ptr<Channel> channel, messages::HelloT hello,
             std::optional<Bytes> host_memory);

  // Takes what has come, waiting at most `timeout`. True where something did. Fails where the loader
  // refuses the claim, with its sentence.
  bool step(Seconds timeout);
  bool greeted() const { return greeted_; }
  // In place of the pool of an earlier claim, if any. REQUIRES: greeted().
  void claim(std::uint64_t region_bytes, const Allocation& host);
  const std::optional<Grant>& grant() const { return grant_; }
  // The pool that is there already, of a planner before this one, instead of a claim.
  void take_over(const Grant& grant) { grant_ = grant; }
  void forget_grant() { grant_.reset(); }
  // Moves the border of the granted pool; settled() once it is where it was wished, and grant() says
  // so. REQUIRES: granted, settled(); no iteration is under way.
  void move_border(std::uint32_t act_blocks, std::uint32_t kv_blocks);
  bool settled() const { return !moving_; }
  // The pool is not needed any more; `left_over`: nor is one that another planner claimed. Once the
  // loader has heard it, and all that was said before, it is not being given back any more.
  void release(bool left_over = false);
  bool gives_back() const { return releases_ > 0; }
  // Weights that a device holds, off the host; all weights, back on it. Done once nothing is asked
  // for any more; a step fails where the loader refuses. REQUIRES: greeted().
  void release_weights(std::int32_t resident_layers);
  void restore_weights();
  bool asked_for_weights() const { return weights_asked_; }

 private:
  void take(const messages::PoolGrant& grant);

  std::unique_ptr<Channel> channel_;
  std::optional<messages::HelloT> hello_;  // until it is said
  bool greeted_ = false;
  messages::PoolClaimT claim_;
  std::optional<Grant> grant_;
  bool moving_ = false;
  int releases_ = 0;  // not answered yet
  bool weights_asked_ = false;
};

}  // namespace poise
