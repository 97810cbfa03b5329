#include "planner/memory/policy_swap.h"

#include <sys/stat.h>

#include <algorithm>

#include "common/files/json.h"
#include "common/files/json_file.h"
#include "common/files/regular_file.h"
#include "common/files/replace_file.h"
#include "common/trouble.h"
#include "common/words.h"

namespace poise {
namespace {

constexpr Bytes kMaxWish{1 << 16};

std::uint32_t blocks_in(std::uint64_t bytes, Bytes block) {
  return static_cast<std::uint32_t>(
      std::min<std::uint64_t>(bytes / static_cast<std::uint64_t>(block.n), UINT32_MAX));
}

}  // namespace

PolicyWish parse_policy_wish(const std::string& text, const std::string& what) {
  const nlohmann::json json = parse_json(text, what);
  const JsonObject object(json, what);
  PolicyWish wish;
  wish.serial = static_cast<std::uint64_t>(object.integer("serial", {.min = 0}).value_or(0));
  wish.act_share = object.number("act_share", {});
  wish.recompute_share = object.number("recompute_share", {});
  wish.machine = object.string("machine");
  wish.rebuild = object.boolean("rebuild").value_or(false);
  const auto policy = object.string("policy");
  if (!policy) {
    object.refuse("policy", "is missing");
  }
  wish.policy = *policy;
  return wish;
}

PolicyWishes::PolicyWishes(const std::filesystem::path& run_dir)
    : path_(run_dir / "policy.json"), in_force_(run_dir / "policy.in_force.json") {}

bool PolicyWishes::changed() {
  struct stat status {};
  if (stat(path_.c_str(), &status) != 0) {
    return false;
  }
  const std::int64_t changed = status.st_ctim.tv_sec * 1'000'000'000 + status.st_ctim.tv_nsec;
  if (status.st_ino == inode_ && changed == changed_ns_) {
    return false;
  }
  inode_ = status.st_ino;
  changed_ns_ = changed;
  return true;
}

PolicyWish PolicyWishes::read() const {
  return parse_policy_wish(read_text_file(path_, kMaxWish), path_.string());
}

std::optional<PolicyWish> PolicyWishes::in_force() const {
  try {
    return parse_policy_wish(read_text_file(in_force_, kMaxWish), in_force_.string());
  } catch (const Failure&) {
    return std::nullopt;
  }
}

void PolicyWishes::put_in_force(const PolicyWish& wish) const {
  nlohmann::ordered_json json{{"serial", wish.serial}, {"policy", wish.policy}};
  if (wish.act_share) {
    json["act_share"] = *wish.act_share;
  }
  if (wish.recompute_share) {
    json["recompute_share"] = *wish.recompute_share;
  }
  if (wish.machine) {
    json["machine"] = *wish.machine;
  }
  replace_file(in_force_, json.dump() + "\n");
}

PoolPartition border_toward(const PoolPartition& now, const Allocation& wished,
                            const BlockPools& pools, const BlockSizes& sizes,
                            std::int64_t least_blocks) {
  PoolPartition next = now;
  next.act_blocks = std::max(wished.act_blocks, pools.pool(BlockKind::act).least_limit());
  next.kv_blocks = std::max(wished.kv_blocks, pools.pool(BlockKind::kv).least_limit());
  if (!next.fits(sizes)) {  // the kind that grows waits for room that the other one still takes
    const auto bytes = [&](BlockKind kind, std::uint32_t blocks) {
      return static_cast<std::uint64_t>(sizes.block(kind).n) * blocks;
    };
    if (next.act_blocks > now.act_blocks) {
      next.act_blocks = blocks_in(next.region_bytes - bytes(BlockKind::kv, next.kv_blocks),
                                  sizes.block(BlockKind::act));
    } else {
      next.kv_blocks = blocks_in(next.region_bytes - bytes(BlockKind::act, next.act_blocks),
                                 sizes.block(BlockKind::kv));
    }
  }
  const std::int64_t all =
      std::int64_t{next.act_blocks} + next.kv_blocks + wished.gpu_act_blocks + wished.gpu_kv_blocks;
  return all < least_blocks ? now : next;
}

}  // namespace poise
