#include "planner/process/run_files.h"

#include <fmt/core.h>

#include <utility>

#include "common/files/sha256.h"
#include "common/trouble.h"
#include "planner/costs/costs.h"
#include "planner/costs/measuring_build.h"
#include "planner/links/clock.h"
#include "planner/links/greeting.h"
#include "planner/results/result_line.h"
#include "planner/results/results_directory.h"
#include "planner/results/results_start.h"

namespace poise {
namespace {

constexpr const char* kProfileOrdersName = "profile-orders.log";
constexpr const char* kProfileName = "profile.json";

Manifest manifest_of(const Run& run) {
  const InputOptions& input = run.options.input;
  return {.build = build_id(),
          .input = run.input.requests.digest,
          .model = to_hex(std::to_array(run.control->fingerprint)),
          .options = {
              {"--dtype", std::string(name_of(run.dtype()))},
              {"--pack-weights", run.shape().packed.codes == Codes::bfloat12 ? "auto" : "off"},
              {"--kv-cache-dtype", std::string(name_of(run.kv_format()))},
              {"--host-attention", run.options.batch.host_attention ? "auto" : "off"},
              {"--absorption", run.options.batch.absorption ? "on" : "off"},
              {"--seed", std::to_string(input.seed)},
              {"--max-model-len", input.max_model_len ? std::to_string(*input.max_model_len)
                                                      : std::string("the model's")},
              {"--served-model-name", run.options.served_model_name},
              {"--skip-tokenizer-init", input.skip_tokenizer_init ? "yes" : "no"},
              {"tokenizer files", input.skip_tokenizer_init ? std::string("not read")
                                                            : tokenizer_files_digest(input.model)},
              {"generation_config.json", generation_config_digest(input.model)}}};
}

}  // namespace

bool RunFiles::open_results() {
  const RunOptions& options = run_.options;
  replaces_ = replaces_finished_run(options.run_dir, options.resume);
  if (!replaces_) {
    begin_results();
  }
  return replaces_ || run_.results;
}

void RunFiles::begin_results() {
  const RunOptions& options = run_.options;
  run_.results = poise::open_results(options.run_dir, options.resume, manifest_of(run_),
                                     run_.input_lines, options.verify);
  if (!run_.results) {
    return;
  }
  if (const Bytes taken_back = run_.results->taken_back(); taken_back > Bytes{0}) {
    run_.print(fmt::format(
        "no check of the weights came behind the last answers ({}): they are computed again\n",
        size_text(taken_back)));
  }
  for (const RequestError& error : run_.input.requests.errors) {
    if (!run_.results->is_done(error.line)) {
      run_.results->append(error.line, true, error_line(error), monotonic_now());
    }
  }
}

void RunFiles::replace(const Profile* profile) {
  if (!std::exchange(replaces_, false)) {
    return;
  }
  begin_results();
  const std::filesystem::path& folder = run_.options.run_dir;
  if (run_.order_log) {
    run_.order_log->begin(folder / kOrdersName);
  }
  if (profile_log_) {
    remove_log(folder / kProfileOrdersName);
    profile_log_->begin(folder / kProfileOrdersName);
    profile_log_.reset();
  }
  if (profile != nullptr) {
    keep(*profile);
  }
}

std::unique_ptr<OrderLog> RunFiles::open_order_log() const {
  return open(kOrdersName, run_.options.orders_log);
}

OrderLog& RunFiles::open_profile_log() {
  profile_log_ = open(kProfileOrdersName, {});
  return *profile_log_;
}

void RunFiles::close_profile_log() {
  if (!replaces_) {
    profile_log_.reset();
  }
}

void RunFiles::keep(const Profile& profile) const {
  if (!replaces_) {
    write_profile(run_.options.run_dir / kProfileName, profile);
  }
}

std::unique_ptr<OrderLog> RunFiles::open(const char* name, const OrderLogLimits& limits) const {
  const std::string header = order_log_header(*run_.control, run_.options.run_id, run_.kv_format());
  return replaces_ ? OrderLog::held(header, limits)
                   : poise::open_order_log(run_.options.run_dir / name, header, limits);
}

}  // namespace poise
