#include "planner/links/status.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <cmath>
#include <span>
#include <utility>

#include "common/files/json.h"
#include "common/files/replace_file.h"
#include "common/trouble.h"
#include "planner/links/clock.h"

namespace poise {
namespace {

constexpr double kInterval = 0.5;
constexpr std::size_t kAnswers = 16;  // kept for users that have not read them yet

double to_four_places(double value) { return std::round(value * 1e4) / 1e4; }

double share(double part, double whole) { return whole > 0 ? to_four_places(part / whole) : 0; }

double seconds_of(std::uint64_t ns) { return static_cast<double>(ns) * 1e-9; }

double busy(std::uint64_t ns, Seconds elapsed) {
  return share(static_cast<double>(ns) * 1e-9, elapsed.n);
}

nlohmann::ordered_json json_of(std::span<const BlocksOf> pools) {
  auto all = nlohmann::ordered_json::array();
  for (const BlocksOf& pool : pools) {
    all.push_back({{"kind", pool.kind},
                   {"place", pool.place},
                   {"total", pool.total},
                   {"taken", pool.taken}});
  }
  return all;
}

nlohmann::ordered_json json_of(std::span<const PolicyAnswer> answers) {
  auto all = nlohmann::ordered_json::array();
  for (const PolicyAnswer& answer : answers) {
    all.push_back({{"serial", answer.serial},
                   {"policy", answer.policy},
                   {"since", answer.since},
                   {"refusal", answer.refusal},
                   {"held_back", answer.held_back}});
  }
  return all;
}

nlohmann::ordered_json busy_json(const ExecutorTotals& totals, Seconds elapsed) {
  return {{"copy_in", busy(totals.copy_in_busy_ns, elapsed)},
          {"compute", busy(totals.compute_busy_ns, elapsed)},
          {"copy_out", busy(totals.copy_out_busy_ns, elapsed)}};
}

nlohmann::ordered_json busy_seconds_json(const ExecutorTotals& totals) {
  return {{"copy_in", seconds_of(totals.copy_in_busy_ns)},
          {"compute", seconds_of(totals.compute_busy_ns)},
          {"copy_out", seconds_of(totals.copy_out_busy_ns)}};
}

// What was predicted beside what was measured.
void add_prediction(const Prediction::Figures& both, std::int64_t generated_tokens,
                    nlohmann::ordered_json& json) {
  const auto each = [&](Seconds all) {
    return both.decoding > 0 ? all.n / static_cast<double>(both.decoding) : 0;
  };
  const auto tokens_per_second = [&](Seconds all) {
    return all.n > 0 ? to_four_places(static_cast<double>(generated_tokens) / all.n) : 0;
  };
  json["predicted"] = {{"decode_iteration_seconds", each(both.decode_predicted)},
                       {"tokens_per_second", tokens_per_second(both.predicted)}};
  json["measured"] = {{"decode_iteration_seconds", each(both.decode_measured)},
                      {"tokens_per_second", tokens_per_second(both.measured)}};
  json["decode_iterations"] = both.decoding;
}

}  // namespace

void RunStatus::answer_wish() {
  policy_answers.push_back({.serial = policy_serial,
                            .policy = policy,
                            .since = policy_since,
                            .refusal = policy_refusal,
                            .held_back = policy_held_back});
  if (policy_answers.size() > kAnswers) {
    policy_answers.erase(policy_answers.begin());
  }
}

void RunStatus::reach(const std::string& moment) {
  if (std::ranges::find(moments, moment, &std::pair<std::string, Seconds>::first) ==
      moments.end()) {
    moments.emplace_back(moment, monotonic_now());
  }
}

std::string to_json(const RunStatus& status) {
  const double seconds = status.elapsed.n;
  const double rate = seconds > 0 ? static_cast<double>(status.generated_tokens) / seconds : 0;
  nlohmann::ordered_json json{
      {"run_id", status.run_id},
      {"state", status.state},
      {"measured", status.measured},
      {"requests", status.requests},
      {"done", status.done},
      {"errors", status.errors},
      {"prompt_tokens", status.prompt_tokens},
      {"generated_tokens", status.generated_tokens},
      {"elapsed_seconds", to_four_places(seconds)},
      {"tokens_per_second", to_four_places(rate)},
      {"running", status.running},
      {"waiting", status.waiting},
      {"preemptions", status.preemptions},
      {"shared_prompt_tokens", status.shared_prompt_tokens},
      {"iteration", status.iteration},
      {"suspects", status.suspects},
      {"pids", {{"planner", status.planner_pid}, {"gpu_executor", status.executor_pid}}},
      {"policy", status.policy},
      {"policy_since", status.policy_since},
      {"policy_serial", status.policy_serial},
      {"policy_refusal", status.policy_refusal},
      {"policy_answers", json_of(std::span<const PolicyAnswer>(status.policy_answers))},
      {"device", status.device},
      {"blocks",
       {{"act", status.act_blocks}, {"kv", status.kv_blocks}, {"free", status.free_blocks}}},
      {"pools", json_of(std::span<const BlocksOf>(status.pools))},
      {"iteration_tokens", status.iteration_tokens.json()},
      {"token_seconds", status.token_seconds.json()},
      {"layers", status.layers},
      {"resident_layers", status.resident_layers},
      {"host_weights_bytes", status.host_weights.n},
      {"host_pool_bytes", status.host_pool.n},
      {"device_bytes", status.device_memory.n},
      {"link_bytes",
       {{"weights", status.executor.weights},
        {"kv", status.executor.kv},
        {"act", status.executor.act},
        {"stores", status.executor.stores}}},
      {"busy", busy_json(status.executor, status.elapsed)},
      {"busy_seconds", busy_seconds_json(status.executor)},
      {"planner",
       {{"planning_share", share(status.planning_time.n, seconds)},
        {"messages_share", share(status.message_time.n, seconds)},
        {"answers_share", share(status.answer_time.n, seconds)}}},
  };
  json["moments"] = nlohmann::ordered_json::object();
  for (const auto& [moment, when] : status.moments) {
    json["moments"][moment] = when.n;
  }
  if (status.prediction) {
    add_prediction(*status.prediction, status.generated_tokens, json);
  }
  if (status.balance && status.balance->all().iterations > 0) {
    json["balance"] = json_of(*status.balance, status.facts);
  }
  if (status.state == "running" && rate > 0) {
    json["seconds_left"] = to_four_places(static_cast<double>(status.tokens_left) / rate);
  }
  return json.dump(1, ' ', false, nlohmann::json::error_handler_t::replace) + "\n";
}

StatusFile::StatusFile(const std::filesystem::path& run_dir) : path_(run_dir / "status.json") {}

bool StatusFile::due(Seconds now) const { return last_.n < 0 || now.n - last_.n >= kInterval; }

void StatusFile::write(const RunStatus& status, Seconds now, bool always) {
  if (!always && !due(now)) {
    return;
  }
  last_ = now;
  try {
    replace_file(path_, to_json(status), {.durable = false});
    complained_ = false;
  } catch (const Failure& failure) {
    if (!std::exchange(complained_, true)) {
      spdlog::warn("{}; the run goes on, its status is old", failure.what());
    }
  }
}

}  // namespace poise
