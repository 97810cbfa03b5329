#include "planner/process/plan_in_force.h"

#include <cmath>

#include <fmt/format.h>
#include <spdlog/spdlog.h>

#include "common/files/json.h"
#include "common/files/json_file.h"
#include "common/files/replace_file.h"
#include "common/process.h"
#include "common/trouble.h"
#include "common/words.h"
#include "planner/costs/machine_file.h"

namespace poise {
namespace {

using Json = nlohmann::json;

constexpr const char* kPlanFile = "plan.json";
constexpr Bytes kMaxPlanFile{1 << 16};

// Every field of a struct and its name in the file.
template <typename Struct, typename Value>
struct Field {
  const char* name;
  Value Struct::*value;
};
constexpr Field<DeviceLimits, std::int32_t> kLimits[] = {
    {"resident_layers", &DeviceLimits::resident_layers},
    {"max_rows", &DeviceLimits::max_rows},
    {"max_mini_batch_rows", &DeviceLimits::max_mini_batch_rows},
    {"max_sequences", &DeviceLimits::max_sequences},
    {"act_slots", &DeviceLimits::act_slots},
    {"kv_slots", &DeviceLimits::kv_slots},
    {"logits_rows", &DeviceLimits::logits_rows},
    {"max_context", &DeviceLimits::max_context},
    {"gpu_act_blocks", &DeviceLimits::gpu_act_blocks},
    {"gpu_kv_blocks", &DeviceLimits::gpu_kv_blocks},
    {"logit_edits", &DeviceLimits::logit_edits},
    {"sides", &DeviceLimits::sides}};
// And kv_format and absorption, which are the run's, and host_attention.
static_assert(sizeof(DeviceLimits) == (std::size(kLimits) + 2) * sizeof(std::int32_t));
constexpr Field<Allocation, std::uint32_t> kBlocks[] = {
    {"act_blocks", &Allocation::act_blocks},
    {"kv_blocks", &Allocation::kv_blocks},
    {"gpu_act_blocks", &Allocation::gpu_act_blocks},
    {"gpu_kv_blocks", &Allocation::gpu_kv_blocks},
    {"host_blocks", &Allocation::host_blocks}};

template <typename Struct, typename Value, std::size_t n>
Json json_of(const Struct& from, const Field<Struct, Value> (&fields)[n]) {
  Json json;
  for (const auto& field : fields) {
    json[field.name] = from.*field.value;
  }
  return json;
}

template <typename Struct, typename Value, std::size_t n>
Struct from_json(const Json& json, const Field<Struct, Value> (&fields)[n]) {
  Struct made;
  for (const auto& field : fields) {
    made.*field.value = json.at(field.name).template get<Value>();
  }
  return made;
}

// Whose plan a kept one is.
Json made_for(const Run& run, const PolicyWish& wish, std::uint64_t pool_epoch) {
  const auto optional = [](const auto& value) { return value ? Json(*value) : Json(); };
  return {{"build", build_id()},
          {"run", run.options.run_id},
          {"pool_epoch", pool_epoch},
          {"device", run.executor->greeting()->device},
          {"device_cap", run.device_cap().n},
          {"max_num_seqs", run.options.batch.max_num_seqs},
          {"policy", wish.policy},
          {"act_share", optional(wish.act_share)},
          {"recompute_share", optional(wish.recompute_share)},
          {"machine", optional(wish.machine)}};
}

// The kept plan where it was made by `wish` for the pool of that epoch; nothing otherwise.
std::optional<RunPlan> kept_plan(const Run& run, const PolicyWish& wish, std::uint64_t pool_epoch) {
  try {
    const Json json = Json::parse(read_text_file(run.options.run_dir / kPlanFile, kMaxPlanFile));
    if (json.at("made_for") != made_for(run, wish, pool_epoch)) {
      return std::nullopt;
    }
    RunPlan plan{.batch = run.options.batch,
                 .demand = demand_of(run.sizes(run.to_do),
                                     json.at("requests_at_a_time").get<std::int32_t>(),
                                     {.window = json.at("kept_window").get<std::int32_t>()},
                                     run.options.batch.prefill_tokens),
                 .host = from_json(json.at("blocks"), kBlocks),
                 .device = from_json(json.at("device"), kLimits),
                 .overhead = {json.at("overhead").get<std::int64_t>()}};
    plan.batch.mini_batch_tokens = json.at("mini_batch_tokens").get<std::int32_t>();
    plan.batch.by_profile = false;
    plan.batch.prompt_rows = json.at("prompt_rows").get<std::int32_t>();
    plan.host.token_blocks = json.at("token_blocks").get<std::int32_t>();
    plan.host.placed = json.at("placed").get<bool>();
    if (json.contains("resident_layers")) {
      plan.host.resident_layers = json.at("resident_layers").get<std::int32_t>();
    }
    plan.host.host_share = json.at("host_share").get<double>();
    plan.device.kv_format = run.kv_format();
    plan.device.host_attention = plan.host.host_share > 0;
    plan.device.absorption = run.options.batch.absorption;
    plan.device_meanwhile = plan.device;
    check_fits(plan_device_memory(run.shape(), run.dtype(), plan.device, plan.overhead),
               run.device_cap());
    return plan;
  } catch (const Failure&) {  // none was kept, say
    return std::nullopt;
  } catch (const Json::exception&) {  // of another version
    return std::nullopt;
  }
}

}  // namespace

std::unique_ptr<Policy> make_policy_as(const PolicyWish& wish, const Run& run,
                                       const std::shared_ptr<const Profile>& profile) {
  PolicyOptions options = run.options.policy_options;
  options.act_share = wish.act_share;
  options.recompute_share = wish.recompute_share;
  options.row_by_row = options.row_by_row && wish.policy == run.options.policy;
  options.profile = wish.machine ? std::make_shared<const Profile>(costs_on(
                                       *wish.machine, run.shape(), run.dtype(), run.kv_format()))
                                 : profile;
  options.profile = deciding_costs(options.profile, run.options.batch.absorption);
  return make_policy(wish.policy, options);
}

PlanningProblem planning_problem(const Run& run, const std::vector<const Request*>& requests,
                                 const std::shared_ptr<const Profile>& profile,
                                 const FixedResources& fixed, Bytes given_back) {
  const Bytes gone = run.layout().layer.bytes * run.released_layers();
  PlanningProblem problem{
      .shape = run.shape(),
      .dtype = run.dtype(),
      .requests = run.sizes(requests),
      .batch = run.options.batch,
      .budget = {.weights = Bytes{static_cast<std::int64_t>(run.control->weights_bytes)} - gone,
                 .available = memory_for_blocks(*run.control) + given_back,
                 .host_memory = run.options.host_memory},
      .device = {.cap = run.device_cap(),
                 .overhead = run.executor->greeting()->overhead,
                 .is_host = run.device_is_host(),
                 .holds_blocks = !run.device_is_host() || run.options.gpu_memory.has_value(),
                 .attends_on_host = run.executor->greeting()->host_threads > 0},
      .profile = profile,
      .fixed = fixed};
  if (run.front) {  // who comes, and when, is not known
    problem.batch.prompt_rows = problem.batch.prompt_rows.value_or(problem.batch.prefill_tokens);
    problem.batch.sides = kFewestSides;
  }
  if (run.released_layers() > 0) {
    problem.fixed.placement.resident_layers = run.released_layers();
  }
  run.options.placement.add_to(problem.fixed.placement, run.shape().num_hidden_layers,
                               problem.device.holds_blocks);
  return problem;
}

RunPlan plan_with_pool(const Run& run, const PlanInForce& in_force, const FixedResources& fixed) {
  const PlanningProblem problem = planning_problem(run, run.to_do, in_force.profile, fixed);
  auto kept = kept_plan(run, in_force.wish, run.loader->grant()->pool_epoch);
  const bool same_blocks = kept && (!fixed.placement.fixes_blocks() ||
                                    (fixed.placement.gpu_act_blocks == kept->host.gpu_act_blocks &&
                                     fixed.placement.gpu_kv_blocks == kept->host.gpu_kv_blocks));
  if (!same_blocks) {
    return solve(*in_force.policy, problem);
  }
  kept->device_meanwhile = limits_until_border_rests(problem, *kept);
  return *std::move(kept);
}

std::string held_back(const RunPlan& plan, const RunPlan& anew) {
  std::vector<std::string> parts;
  const auto differs = [&](std::int64_t now, std::int64_t then, const char* what) {
    // A few blocks more or less are rounding.
    if (std::abs(now - then) * 50 > std::max(now, then)) {
      parts.push_back(fmt::format("{} {} instead of {}", now, what, then));
    }
  };
  differs(plan.demand.sequences, anew.demand.sequences, "requests at a time");
  differs(plan.blocks(), anew.blocks(), "blocks of context");
  differs(plan.host.gpu_act_blocks, anew.host.gpu_act_blocks, "ACT blocks on the device");
  differs(plan.host.gpu_kv_blocks, anew.host.gpu_kv_blocks, "KV blocks on the device");
  differs(plan.device.resident_layers, anew.device.resident_layers, "layers on the device");
  return parts.empty() ? ""
                       : fmt::format("until its pools are made anew (--rebuild) this run has {}",
                                     fmt::join(parts, ", "));
}

void keep_plan(const Run& run, const PlanInForce& in_force, std::uint64_t pool_epoch) {
  const RunPlan& plan = in_force.plan;
  Json json{{"made_for", made_for(run, in_force.wish, pool_epoch)},
            {"requests_at_a_time", plan.demand.sequences},
            {"kept_window", plan.demand.kept.window},
            {"mini_batch_tokens", plan.batch.mini_batch_tokens},
            {"prompt_rows", plan.batch.prompt_rows.value_or(plan.batch.prefill_tokens)},
            {"blocks", json_of(plan.host, kBlocks)},
            {"token_blocks", plan.host.token_blocks},
            {"placed", plan.host.placed},
            {"host_share", plan.host.host_share},
            {"device", json_of(plan.device, kLimits)},
            {"overhead", plan.overhead.n}};
  if (plan.host.resident_layers) {
    json["resident_layers"] = *plan.host.resident_layers;
  }
  try {
    replace_file(run.options.run_dir / kPlanFile, json.dump(1) + "\n");
  } catch (const Failure& failure) {
    spdlog::warn("{}; a planner that takes over plans anew", failure.what());
  }
}

}  // namespace poise
