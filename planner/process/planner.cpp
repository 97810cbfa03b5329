#include "planner/process/planner.h"

#include <fmt/core.h>
#include <spdlog/spdlog.h>

#include "common/process.h"
#include "common/testing/failpoint.h"
#include "common/words.h"
#include "planner/links/announce.h"
#include "planner/links/clock.h"
#include "planner/links/stale_memory.h"
#include "planner/results/results_directory.h"
#include "planner/results/results_output.h"
#include "planner/results/results_start.h"

namespace poise {
namespace {

constexpr Seconds kWait{0.1};          // for messages, where nothing else is to be done
constexpr Seconds kLastIteration{15};  // how long an iteration under way may take after SIGTERM
constexpr Seconds kLastWords{0.5};     // for the loader to read the last messages
constexpr Seconds kLastWordsStep{0.01};

// What can be refused without reading the model or the requests.
RunOptions checked(RunOptions options) {
  check_run_directory(options.run_dir, options.resume);
  const bool is_written = run_state(options.run_dir) == RunState::finished && options.resume;
  if (options.front_socket.empty() && !is_written) {
    check_output(options.output, options.input.input, options.overwrite);
  }
  return options;
}

// Of a run that was finished before. Where its output is gone by now, the errors are those that the
// input alone decides.
void count_finished(Run& run) {
  const auto counts = count_published(run.options.run_dir, run.input_lines);
  run.status.done = run.status.requests;
  run.status.errors = counts ? counts->errors : run.input.requests.errors.size();
}

}  // namespace

Planner::Planner(RunOptions options)
    : run_(checked(std::move(options))),
      hand_over_(run_),
      change_(run_, in_force_),
      preparation_(run_, in_force_, change_, hand_over_),
      verification_(run_) {
  failpoint("planner.validated");
  report(true);
}

bool Planner::step() {
  if (stop_requested() && give_up()) {
    interrupt();
    return false;
  }
  if (hand_over_requested() && !loop_ && phase_ != Phase::over && !preparation_.is_profiling()) {
    hand_over();
    return false;
  }
  bool moved = false;
  switch (phase_) {
    case Phase::preparing:
      moved = prepare();
      break;
    case Phase::configuring:
      moved = await_executor();
      break;
    case Phase::running:
      moved = run();
      break;
    case Phase::confirming:
      finish();
      break;
    case Phase::over:
      break;
  }
  if (moved) {
    run_.control->progress[static_cast<int>(Process::planner)].steps.fetch_add(
        1, std::memory_order_release);
  }
  return phase_ != Phase::over;
}

// ---- up to an executor that is ready

bool Planner::prepare() {
  const bool moved = preparation_.step();
  if (preparation_.is_answered()) {
    if (run_.results) {
      finish();
    } else {  // the run was finished before
      count_finished(run_);
      end(Exit::done, "done");
    }
  } else if (preparation_.is_ready()) {
    configure();
  }
  report();
  return moved;
}

bool Planner::configure() {
  run_.status.reach("pool");
  change_.log_pool();
  run_.executor->configure(in_force_.device, run_.device_cap(), run_.layout(), run_.options.trace);
  phase_ = Phase::configuring;
  return true;
}

bool Planner::await_executor() {
  const bool moved = run_.step_executor(kWait);
  if (run_.executor->returned()) {
    recover_executor();
  } else if (run_.executor->ready()) {
    begin_running();
  }
  return moved;
}

void Planner::begin_running() {
  run_.status.reach("ready");
  if (!loop_) {
    preparation_.replace_finished_run();
    run_.executor->begin_balance();  // what was measured before is no part of the run
    loop_.emplace(run_, in_force_, hand_over_.take());
    if (hand_over_.takes_over()) {
      const std::int64_t begun = loop_->begun();
      announce(run_.front ? "another planner goes on; the front sends it what is open"
                          : fmt::format("a planner took over before iteration {}: it continues {} "
                                        "and begins {}",
                                        loop_->next_iteration(), counted(begun, "request"),
                                        std::ssize(run_.to_do) - begun));
      run_.status.policy_since = loop_->next_iteration();
      if (run_.status.policy_serial != 0) {
        run_.status.answer_wish();
      }
    }
    keep_plan(run_, in_force_, run_.loader->grant()->pool_epoch);
    change_.log_policy(loop_->next_iteration());
  }
  loop_->configured();
  run_.status.executor_pid = run_.executor->greeting()->pid;
  run_.status.state = "running";
  phase_ = Phase::running;
  report(true);
}

// ---- iterations

bool Planner::run() {
  if (run_.executor->returned()) {
    recover_executor();
    return true;
  }
  bool moved = false;
  if (!run_.executor->busy() && !run_.executor->gone()) {
    if (!between_iterations()) {
      return phase_ != Phase::running;  // to wait for the loader is no progress
    }
    if (run_.front && !loop_->receive_requests(kWait)) {
      run_.step_executor(Seconds{0});
      report();
      return true;  // to wait for a request is no standstill
    }
    if (!loop_->begin_iteration()) {
      if (!run_.front && loop_->idle()) {
        finish();
      }
      return true;
    }
    run_.status.reach("first_order");
    moved = true;
  }
  moved = run_.step_executor(kWait) || moved;
  if (loop_->take_results()) {
    moved = true;
    if (run_.front) {
      run_.front->flush(monotonic_now());
    } else if (loop_->idle()) {
      finish();
      return true;
    }
  }
  if (run_.results) {
    run_.results->tick(monotonic_now());
  }
  report();
  return moved;
}

// True where the next iteration may be planned.
bool Planner::between_iterations() {
  failpoint("planner.between_iterations");
  if (hand_over_requested() && run_.loader->settled()) {
    hand_over();
    return false;
  }
  verification_.step();
  const std::uint64_t answered = run_.status.policy_serial;
  const PolicyChange::Next next = change_.step(*loop_);
  report(run_.status.policy_serial != answered);
  switch (next) {
    case PolicyChange::Next::go_on:
      return true;
    case PolicyChange::Next::wait:
      break;
    case PolicyChange::Next::configure:
      configure();
      break;
    case PolicyChange::Next::rebuild:
      prepare_again();
      preparation_.begin_again_without_pool();
      break;
  }
  return false;
}

// Another executor, or one that lost the connection: it has no iteration under way, and blocks on the
// device are lost. Their contents are computed again, with the same bits.
void Planner::recover_executor() {
  if (loop_) {
    loop_->executor_was_lost();
    report(true);  // before another death: the supervisor reads whether a culprit is looked for
    if (loop_->idle() && !run_.front) {
      finish();
      return;
    }
  }
  if (find_stale_memory(*run_.control, *run_.executor->greeting(), true).lost_layers > 0) {
    prepare_again();
    return;
  }
  if (loop_) {
    announce("the gpu_executor is back: the iteration under way is sent again");
  }
  configure();
}

// From the greeting on, with all that was answered so far, but no block is left.
void Planner::prepare_again() {
  if (loop_) {
    hand_over_.keep(*loop_);
    run_.to_do = loop_->unanswered();
    loop_.reset();
    run_.status.tokens_left = 0;
    for (const Request* request : run_.to_do) {
      run_.status.tokens_left += request->sampling.max_tokens;
    }
  }
  preparation_.begin_again();
  phase_ = Phase::preparing;
  report(true);
}

// Loader and executor stay; so do the pool and all that lies in it. A front sends its requests again, so
// there is nothing to leave.
void Planner::hand_over() {
  if (run_.results) {
    run_.results->sync();
  }
  if (!run_.front) {
    hand_over_.write(loop_ ? &*loop_ : nullptr);
  }
  if (loop_) {
    report(true);
    spdlog::info("handed over before iteration {}", loop_->next_iteration());
  }
  if (run_.order_log) {
    run_.order_log->flush();
  }
  outcome_ = Exit::handed_over;
  phase_ = Phase::over;
}

// ---- the end

// SIGTERM: waits for the iteration under way, which may bring answers, but only for a limited time.
bool Planner::give_up() {
  if (!stopping_since_) {
    stopping_since_ = monotonic_now();
  }
  const bool worth_waiting =
      phase_ == Phase::running && run_.executor->busy() && !run_.executor->gone() && !orphaned();
  return !worth_waiting || monotonic_now() - *stopping_since_ > kLastIteration;
}

void Planner::interrupt() {
  if (run_.results) {
    run_.results->sync();
  }
  end(Exit::interrupted, "interrupted");
  leave("interrupted");
}

void Planner::finish() {
  run_.status.reach("last_answer");
  run_.results->sync();
  if (!verification_.confirm()) {
    phase_ = Phase::confirming;
    return;
  }
  if (run_.order_log) {
    run_.order_log->flush();
  }
  failpoint("planner.all_done");
  const ResultCounts counts = run_.results->counts();
  publish(std::move(*run_.results), run_.options.run_dir, run_.options.output,
          run_.options.overwrite, run_.input_lines);
  run_.results.reset();  // from here on nothing fails: the output is there
  run_.status.reach("published");
  run_.status.done = counts.lines();
  run_.status.errors = counts.errors;
  end(Exit::done, "done");
  leave("all requests are done");
}

void Planner::end(Exit outcome, const char* state) {
  if (run_.order_log) {
    run_.order_log->flush();
  }
  run_.status.state = state;
  report(true);
  outcome_ = outcome;
  phase_ = Phase::over;
}

// Gives the pool back and asks for released weights, for a kept loader. Messages that it has not read when this
// process ends are lost, which makes no run fail. The executor ends; under a supervisor, the supervisor
// ends it after this process.
void Planner::leave(const std::string& reason) {
  try {
    if (LoaderLink* const loader = run_.loader.get()) {
      loader->release();
      if (run_.released_layers() > 0) {
        loader->restore_weights();
        loader->release(true);  // whose answer says that all was heard
      }
      for (const Seconds end = monotonic_now() + kLastWords;
           loader->gives_back() && monotonic_now() < end;) {
        loader->step(kLastWordsStep);
      }
    }
  } catch (const Failure& failure) {
    spdlog::warn("the loader could not be told that this planner ends: {}", failure.what());
  }
  if (run_.executor && run_.options.death_descriptor < 0) {
    run_.executor->stop(reason);
  }
}

void Planner::report(bool always) {
  const Seconds time = monotonic_now();
  if (!always && !run_.status_file.due(time)) {
    return;
  }
  RunStatus& status = run_.status;
  if (run_.results) {  // of a front's requests the run counts them
    status.done = run_.results->counts().lines();
    status.errors = run_.results->counts().errors;
  }
  if (loop_) {
    loop_->report();
  }
  if (run_.executor) {
    status.executor = run_.executor->totals();
    status.host_weights = Bytes{static_cast<std::int64_t>(run_.control->weights_bytes)} -
                          run_.layout().layer.bytes * run_.released_layers();
    status.balance = run_.executor->balance();
    status.message_time = run_.executor->message_time();
  }
  if (run_.order_log) {
    run_.order_log->flush();
  }
  run_.status_file.write(status, time, true);
}

std::string Planner::summary() const {
  const RunStatus& status = run_.status;
  return fmt::format(
      "{}, {} of them errors; {} prompt and {} in {:.1f} s ({:.1f} tokens/s), {}, {}",
      counted(status.done, "result"), status.errors, status.prompt_tokens,
      counted(status.generated_tokens, "generated token"), status.elapsed.n,
      status.elapsed.n > 0 ? static_cast<double>(status.generated_tokens) / status.elapsed.n : 0,
      counted(status.iteration, "iteration"), counted(status.preemptions, "preemption"));
}

}  // namespace poise
