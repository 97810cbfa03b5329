#pragma once
// Another policy during a run: the user's wish, what it needs of the existing pool and device, and how
// the border between the pools reaches its new place. Stored blocks of either kind stay where they are
// and stay valid; a swap changes which blocks are taken from then on. These functions decide;
// planner/process/policy_change.cpp acts.

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>

#include "common/blocks.h"
#include "common/device_memory.h"
#include "planner/memory/sizes.h"
#include "planner/policies/policy.h"
#include "planner/schedule/block_table.h"

namespace poise {

// RUN/policy.json, as `poise policy` writes it (by rename); RUN/policy.in_force.json is the last wish
// that was fulfilled, for a planner that takes over.
// {"serial": 7, "policy": "hybrid", "act_share": 0.25, "machine": "h200-pcie5"}
struct PolicyWish {
  std::uint64_t serial = 0;  // names the wish in the answer (status.json)
  std::string policy;
  std::optional<double> act_share = std::nullopt;
  std::optional<double> recompute_share = std::nullopt;
  std::optional<std::string> machine = std::nullopt;
  bool rebuild = false;  // make new pools for it; requests under way are computed again
};

// Fails with a sentence if it is none.
PolicyWish parse_policy_wish(const std::string& text, const std::string& what);

class PolicyWishes {
 public:
  explicit PolicyWishes(const std::filesystem::path& run_dir);
  // Whether the file has changed since the last call. Costs one stat(2).
  bool changed();
  // Fails if there is none or it cannot be read.
  PolicyWish read() const;
  // Nothing if no wish was fulfilled, or if it cannot be read.
  std::optional<PolicyWish> in_force() const;
  // Fails (Exit::busy) if the disk does not take it: the file then names an older policy, if any.
  void put_in_force(const PolicyWish& wish) const;

 private:
  std::filesystem::path path_, in_force_;
  std::uint64_t inode_ = 0;
  std::int64_t changed_ns_ = 0;
};

// The partition nearest to `wished` that loses no taken block of `pools` and holds `least_blocks` in
// all; `now` if there is no nearer one.
PoolPartition border_toward(const PoolPartition& now, const Allocation& wished,
                            const BlockPools& pools, const BlockSizes& sizes,
                            std::int64_t least_blocks);

}  // namespace poise
