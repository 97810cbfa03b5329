#pragma once
// The planner's side of the talk with the loader: it greets, claims a block pool and is granted one.
// Steps do not block longer than they are told; one thread.

#include <memory>
#include <optional>
#include <string>

#include "common/blocks.h"
#include "common/channel.h"
#include "planner/policy.h"

namespace poise {

class LoaderLink {
 public:
  struct Grant {
    std::uint64_t pool_epoch;
    PoolPartition partition;
  };

  // `hello` is said as soon as the loader is there.
  LoaderLink(std::unique_ptr<Channel> channel, messages::HelloT hello);

  // Takes what has come, waiting at most `timeout`. True where something did. Fails where the loader
  // refuses the claim, with its sentence.
  bool step(Seconds timeout);
  bool greeted() const { return greeted_; }
  // In place of the pool of an earlier claim, if any. REQUIRES: greeted().
  void claim(std::uint64_t region_bytes, const Allocation& host);
  const std::optional<Grant>& grant() const { return grant_; }
  // The pool is not needed any more.
  void release();

 private:
  void take(const messages::PoolGrant& grant);

  std::unique_ptr<Channel> channel_;
  std::optional<messages::HelloT> hello_;  // until it is said
  bool greeted_ = false;
  messages::PoolClaimT claim_;
  std::optional<Grant> grant_;
};

}  // namespace poise
