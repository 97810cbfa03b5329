#pragma once
// What policies are asked in these tests, and the kinds that a request's blocks then have.

#include <memory>
#include <string>

#include "planner/policies/allocation.h"
#include "planner/policies/policy.h"
#include "tests/support/source_folder.h"

namespace poise {

inline constexpr BlockSizes kMultiHead{.kv_row = {8192}, .act_row = {4096}};
inline constexpr BlockSizes kGroupedQueries{.kv_row = {2048}, .act_row = {8192}};

inline AllocationInputs inputs(BlockSizes sizes, Bytes host, std::int64_t most_blocks) {
  return {
      .sizes = sizes, .layers = 4, .host = host, .most_blocks = most_blocks, .largest_request = 1};
}

// The device has room for half of the ACT blocks.
inline AllocationInputs half_on_device() {
  AllocationInputs from = inputs(kMultiHead, kMiB * 256, 400);
  from.sequences = 8;
  from.requests = 8;
  from.prompt_rows = 400 * kBlockTokens;
  const Bytes room = kMultiHead.block(BlockKind::act) * 200 * from.layers;
  from.device = DeviceRoom{.layer = room * 2,
                           .streaming = {0},
                           .left = [room](std::int64_t, std::int64_t, std::int64_t) { return room; }};
  return from;
}

// The kinds of a request's blocks, first to last.
inline std::string kinds(const Policy& policy, const Allocation& host, std::int32_t blocks) {
  RequestSplit request{.most_blocks = blocks};
  std::string kinds;
  for (std::int32_t i = 0; i < blocks; ++i) {
    const bool act = policy.next_block(host, request) == BlockKind::act;
    kinds += act ? 'A' : 'K';
    ++(act ? request.act_blocks : request.kv_blocks);
  }
  return kinds;
}

// OPT-6.7B's, on an H200 of 24 GiB.
inline std::shared_ptr<const Profile> h200_profile() {
  return std::make_shared<const Profile>(
      read_profile(source_folder() / "tests" / "planner" / "profiles" / "h200_opt_6.7b.json"));
}

inline AllocationInputs opt_6_7b_inputs(std::int64_t most_blocks, std::int32_t largest_request) {
  AllocationInputs from = inputs({.kv_row = {16384}, .act_row = {8192}}, kGiB * 90, most_blocks);
  from.layers = 32;
  from.largest_request = largest_request;
  from.mini_batch = 512;
  return from;
}

}  // namespace poise
