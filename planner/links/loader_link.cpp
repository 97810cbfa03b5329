#include "planner/links/loader_link.h"

#include "common/trouble.h"
#include "planner/links/clock.h"

namespace poise {
namespace {

constexpr Seconds kSuccessorComes{10};

}  // namespace

LoaderLink::LoaderLink(std::unique_ptr<Channel> channel, messages::HelloT hello,
                       std::optional<Bytes> host_memory, KvFormat kv_format)
    : channel_(std::move(channel)), hello_(std::move(hello)) {
  claim_.kv_format = static_cast<messages::KvFormat>(kv_format);
  claim_.host_memory = static_cast<std::uint64_t>(host_memory.value_or(Bytes{INT64_MAX}).n);
}

bool LoaderLink::step(Seconds timeout) {
  greet();
  const auto message = channel_->receive(timeout);
  if (!message) {
    return false;
  }
  if ((*message)->body_type() == messages::Body::LoaderReply) {
    greeted_ = true;
    greeted_on_ = channel_->connections();
    ask_again();
  } else if (const auto* grant = (*message)->body_as_PoolGrant()) {
    take(*grant);
  } else if (const auto* held = (*message)->body_as_WeightsHeld()) {
    weights_.reset();
    if (!held->done()) {
      fail(Exit::interrupted, "the loader: {}",
           held->sentence() != nullptr ? held->sentence()->str() : "it gave no reason");
    }
  } else if (const auto* checked = (*message)->body_as_WeightsChecked()) {
    if (check_ && checked->serial() == check_->serial) {
      check_.reset();
      checked_.emplace();
      checked->UnPackTo(&*checked_);
    }
  } else if (const auto* stop = (*message)->body_as_Stop()) {
    fail(Exit::interrupted, "the loader ends: {}",
         stop->reason() != nullptr ? stop->reason()->str() : "it gave no reason");
  }
  return true;
}

void LoaderLink::greet() {
  if (channel_->connected() && said_hello_on_ != channel_->connections() &&
      send(*channel_, messages::HelloT(hello_))) {
    said_hello_on_ = channel_->connections();
  }
  if (listens() && channel_->connected()) {
    deaf_since_.reset();
  } else if (greeted_ && awaits_anything()) {
    deaf_since_ = deaf_since_.value_or(monotonic_now());
    if (monotonic_now() - *deaf_since_ > kSuccessorComes) {
      fail(Exit::interrupted, "the loader is gone");
    }
  }
}

// What cannot be sent now is asked for once a loader has answered Hello.
template <typename Table>
void LoaderLink::ask(Table&& table) {
  if (listens()) {
    send(*channel_, std::forward<Table>(table));
  }
}

// Of a loader that has adopted its predecessor's segments. Each request may have been fulfilled before,
// and may be fulfilled twice.
void LoaderLink::ask_again() {
  if (releases_ > 0) {
    releases_ = 1;
    ask(messages::PoolReleaseT{});
  }
  if (weights_) {
    *weights_ > 0 ? ask(messages::WeightsReleaseT{.resident_layers = *weights_})
                  : ask(messages::WeightsRestoreT{});
  }
  if (check_) {
    ask(messages::WeightsCheckT(*check_));
  }
  if (claiming_) {
    ask(messages::PoolClaimT(claim_));
  } else if (moving_) {
    ask(messages::PoolPartitionChangeT{.act_blocks = claim_.act_blocks,
                                       .kv_blocks = claim_.kv_blocks});
  }
}

void LoaderLink::claim(std::uint64_t region_bytes, const Allocation& host) {
  check(greeted_, "a pool is claimed of a loader that is there");
  grant_.reset();
  claim_.region_bytes = region_bytes;
  claim_.act_blocks = host.act_blocks;
  claim_.kv_blocks = host.kv_blocks;
  claiming_ = true;
  moving_ = false;
  ask(messages::PoolClaimT(claim_));
}

void LoaderLink::move_border(std::uint32_t act_blocks, std::uint32_t kv_blocks) {
  check(grant_ && settled(), "the border of a granted pool moves, one step at a time");
  claim_.region_bytes = grant_->partition.region_bytes;
  claim_.act_blocks = act_blocks;
  claim_.kv_blocks = kv_blocks;
  moving_ = true;
  ask(messages::PoolPartitionChangeT{.act_blocks = act_blocks, .kv_blocks = kv_blocks});
}

void LoaderLink::take(const messages::PoolGrant& grant) {
  if (releases_ > 0) {  // what was asked for before does not matter any more
    releases_ -= grant.granted() && grant.pool_epoch() == 0 ? 1 : 0;
    return;
  }
  if (!grant.granted()) {
    fail("{}", grant.sentence() != nullptr && grant.sentence()->size() > 0
                   ? grant.sentence()->str()
                   : "the loader refuses the block pool without a reason");
  }
  if (grant.act_blocks() != claim_.act_blocks || grant.kv_blocks() != claim_.kv_blocks ||
      grant.region_bytes() < claim_.region_bytes || grant.kv_format() != claim_.kv_format) {
    fail(Exit::interrupted, "the loader granted another block pool than was claimed");
  }
  claiming_ = moving_ = false;
  grant_ = Grant{.pool_epoch = grant.pool_epoch(),
                 .partition = {.region_bytes = grant.region_bytes(),
                               .act_blocks = grant.act_blocks(),
                               .kv_blocks = grant.kv_blocks()}};
}

void LoaderLink::release_weights(std::int32_t resident_layers) {
  weights_ = resident_layers;
  ask(messages::WeightsReleaseT{.resident_layers = resident_layers});
}

void LoaderLink::restore_weights() {
  weights_ = 0;
  ask(messages::WeightsRestoreT{});
}

void LoaderLink::check_weights(bool at_once) {
  checked_.reset();
  check_ = messages::WeightsCheckT{.serial = ++checks_, .at_once = at_once};
  ask(messages::WeightsCheckT(*check_));
}

void LoaderLink::release(bool left_over) {
  if (grant_ || left_over) {
    grant_.reset();
    claiming_ = moving_ = false;
    ++releases_;
    ask(messages::PoolReleaseT{});
  }
}

}  // namespace poise
