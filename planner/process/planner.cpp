#include "planner/process/planner.h"

#include <fmt/core.h>
#include <spdlog/spdlog.h>
#include <unistd.h>

#include <algorithm>
#include <ctime>

#include "common/process.h"
#include "common/trouble.h"
#include "common/words.h"
#include "planner/links/clock.h"
#include "planner/results/results_directory.h"
#include "planner/results/results_output.h"
#include "planner/results/results_start.h"

namespace poise {
namespace {

constexpr Seconds kWait{0.1};          // for messages, where nothing else is to be done
constexpr Seconds kLastIteration{15};  // an iteration under way may take so long after SIGTERM
constexpr Seconds kLastWords{0.5};     // for the loader to hear the last words
constexpr Seconds kLastWordsStep{0.01};

// What can be refused without reading the model or the requests.
RunOptions checked(RunOptions options) {
  check_run_directory(options.run_dir, options.resume);
  if (run_state(options.run_dir) != RunState::finished || !options.resume) {
    check_output(options.output, options.input.input, options.overwrite);
  }
  return options;
}

}  // namespace

Planner::Planner(RunOptions options)
    : options_(checked(std::move(options))),
      input_(read_run_input(options_.input)),
      control_(Control::attach(options_.run_id)),
      input_lines_(input_.requests.line_numbers()),
      wishes_(options_.run_dir),
      status_file_(options_.run_dir) {
  if (control_->shape != input_.model.shape) {
    fail(Exit::foreign, "the loader holds another model than {}", options_.input.model.string());
  }
  spdlog::info("{} and {} that {} none in {}", counted(input_.requests.requests.size(), "request"),
               counted(input_.requests.errors.size(), "line"),
               input_.requests.errors.size() == 1 ? "is" : "are", options_.input.input.string());
  status_.state = "loading";
  status_.planner_pid = getpid();
  status_.requests = input_.requests.lines();
  report(true);
}

Planner::~Planner() = default;

bool Planner::step() {
  if (stop_requested() && give_up()) {
    interrupt();
    return false;
  }
  if (hand_over_requested() && !scheduler_ && phase_ != Phase::over && phase_ != Phase::profiling) {
    hand_over();  // there is nothing yet to leave behind
    return false;
  }
  bool moved = false;
  switch (phase_) {
    case Phase::loading:
      moved = load();
      break;
    case Phase::greeting:
      moved = greet();
      break;
    case Phase::profiling:
      moved = measure();
      break;
    case Phase::claiming:
      moved = loader_->step(kWait);
      if (loader_->grant() && loader_->settled()) {
        moved = configure();
      }
      break;
    case Phase::configuring:
      moved = step_executor(kWait);
      if (executor_->returned()) {
        go_on_with_executor();
      } else if (executor_->ready() && layers_to_release_ > 0 && released_layers() == 0) {
        release_weights();
      } else if (executor_->ready()) {
        begin_running();
      }
      break;
    case Phase::releasing:
      moved = loader_->step(kWait);
      if (!loader_->asked_for_weights()) {
        claim_pool();
      }
      break;
    case Phase::running:
      moved = run();
      break;
    case Phase::over:
      break;
  }
  if (moved) {
    control_->progress[static_cast<int>(Process::planner)].steps.fetch_add(
        1, std::memory_order_release);
  }
  return phase_ != Phase::over;
}

// ---- iterations

bool Planner::run() {
  if (executor_->returned()) {
    go_on_with_executor();
    return true;
  }
  bool moved = false;
  if (!executor_->busy() && !executor_->gone()) {
    if (!border_rests()) {
      return true;
    }
    if (hand_over_requested()) {
      hand_over();
      return true;
    }
    if (!settle()) {
      return true;
    }
    plan_iteration();
    moved = true;
  }
  moved = step_executor(kWait) || moved;
  if (const auto results = executor_->take_results()) {
    take_results(*results);
    moved = true;
    if (scheduler_->idle()) {
      finish();
      return true;
    }
  }
  results_->tick(monotonic_now());
  report();
  return moved;
}

// Without a supervisor nobody starts another executor.
bool Planner::step_executor(Seconds wait) {
  const bool moved = executor_->step(wait);
  if (executor_->gone() && options_.death_descriptor < 0) {
    fail(Exit::interrupted, "the gpu_executor is gone");
  }
  return moved;
}

void Planner::plan_iteration() {
  const Seconds begin = monotonic_now();
  const auto chunks = scheduler_->next();
  chunks_.assign(chunks.begin(), chunks.end());
  const auto items = pack_items(chunks_);
  const auto batches = policy_->pack(host_, items, pack_limits_);
  messages::IterationT tables =
      order_tables_->build(++iteration_, loader_->grant()->pool_epoch, chunks_, items, batches);
  const bool last = scheduler_->last_iteration();
  if (prediction_) {
    prediction_->begin(tables, last, begin);
  }
  status_.planning_time += monotonic_now() - begin;
  executor_->begin(std::move(tables), last);
}

void Planner::take_results(const Received& results) {
  const Seconds begin = monotonic_now();
  if (prediction_) {
    prediction_->done(begin);
  }
  const AnswerBook::Progress progress =
      answers_->apply(chunks_, *results->body_as_IterationDone(), std::time(nullptr));
  write_lines(progress.lines);
  const Seconds middle = monotonic_now();
  scheduler_->complete(progress.outcomes);
  chunks_.clear();
  status_.answer_time += middle - begin;
  status_.planning_time += monotonic_now() - middle;
  status_.prompt_tokens += progress.prompt_tokens;
  status_.generated_tokens += progress.generated_tokens;
  status_.tokens_left -= progress.generated_tokens + progress.saved_tokens;
}

void Planner::write_lines(const std::vector<ResultLine>& lines) {
  for (const ResultLine& line : lines) {
    results_->append(line.request, line.error, line.text, monotonic_now());
  }
}

// ---- the end

// SIGTERM: the iteration under way may bring answers, so it is waited for, but not for ever.
bool Planner::give_up() {
  if (!stopping_since_) {
    stopping_since_ = monotonic_now();
  }
  const bool worth_waiting =
      phase_ == Phase::running && executor_->busy() && !executor_->gone() && !orphaned();
  return !worth_waiting || monotonic_now() - *stopping_since_ > kLastIteration;
}

void Planner::interrupt() {
  if (results_) {
    results_->sync();
  }
  if (order_log_) {
    order_log_->flush();
  }
  status_.state = "interrupted";
  report(true);
  leave("interrupted");
  outcome_ = Exit::interrupted;
  phase_ = Phase::over;
}

void Planner::finish() {
  results_->sync();
  if (order_log_) {
    order_log_->flush();
  }
  const ResultCounts counts = results_->counts();
  publish(std::move(*results_), options_.run_dir, options_.output, options_.overwrite,
          input_lines_);
  results_.reset();  // from here on nothing fails: the output is there
  status_.done = counts.lines();
  status_.errors = counts.errors;
  status_.state = "done";
  report(true);
  leave("all requests are done");
  outcome_ = Exit::done;
  phase_ = Phase::over;
}

// A loader that is kept may have the pool's memory back, and is kept whole. What it has not heard when
// this process ends is lost; no run fails by that. The executor ends; where there is a supervisor, by
// its hand, once this process has ended.
void Planner::leave(const std::string& reason) {
  try {
    if (loader_) {
      loader_->release();
      if (released_layers() > 0) {
        loader_->restore_weights();
        loader_->release(true);  // whose answer says that all was heard
      }
      for (const Seconds end = monotonic_now() + kLastWords;
           loader_->gives_back() && monotonic_now() < end;) {
        loader_->step(kLastWordsStep);
      }
    }
  } catch (const Failure& failure) {
    spdlog::warn("the loader was not taken leave of: {}", failure.what());
  }
  if (executor_ && options_.death_descriptor < 0) {
    executor_->stop(reason);
  }
}

void Planner::report(bool always) {
  const Seconds time = monotonic_now();
  if (!always && !status_file_.due(time)) {
    return;
  }
  if (results_) {
    status_.done = results_->counts().lines();
    status_.errors = results_->counts().errors;
  }
  if (scheduler_) {
    status_.running = scheduler_->running();
    status_.waiting = scheduler_->waiting();
    status_.preemptions = preemptions_before_ + scheduler_->preemptions();
    status_.free_blocks = scheduler_->blocks().free();
  }
  if (executor_) {
    status_.executor = executor_->totals();
    status_.balance = executor_->balance();
    status_.message_time = executor_->message_time();
  }
  if (order_log_) {
    order_log_->flush();
  }
  if (prediction_) {
    status_.prediction = prediction_->figures();
  }
  status_.iteration = iteration_;
  status_.elapsed = running_since_ ? time - *running_since_ : Seconds{0};
  status_file_.write(status_, time, true);
}

std::string Planner::summary() const {
  return fmt::format(
      "{}, {} of them errors; {} prompt and {} in {:.1f} s ({:.1f} tokens/s), {}, {}",
      counted(status_.done, "result"), status_.errors, status_.prompt_tokens,
      counted(status_.generated_tokens, "generated token"), status_.elapsed.n,
      status_.elapsed.n > 0 ? static_cast<double>(status_.generated_tokens) / status_.elapsed.n : 0,
      counted(status_.iteration, "iteration"), counted(status_.preemptions, "preemption"));
}

}  // namespace poise
