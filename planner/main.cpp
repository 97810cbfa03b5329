#include <fmt/core.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <iostream>
#include <string>
#include <system_error>

#include "common/files/json.h"
#include "common/files/json_file.h"
#include "common/model_config.h"
#include "common/process.h"
#include "common/trouble.h"
#include "common/words.h"
#include "planner/forecast/plan.h"
#include "planner/forecast/planning_time.h"
#include "planner/forecast/simulate_papers.h"
#include "planner/forecast/simulate_table.h"
#include "planner/options.h"
#include "planner/process/planner.h"
#include "planner/profile/profile_run.h"
#include "planner/record/check/log_check.h"
#include "planner/record/inspect.h"
#include "planner/record/log_difference.h"
#include "planner/replay/replay.h"
#include "planner/tokenizer/tokenizer.h"

namespace {

using namespace poise;

Exit run(RunOptions options) {
  watch_signals(options.death_descriptor);
  open_log("planner", options.log);
  Planner planner(std::move(options));
  while (planner.step()) {
  }
  if (planner.outcome() != Exit::handed_over) {
    fmt::print("{}\n", planner.summary());
  }
  return planner.outcome();
}

Exit run(ProfileOptions options) {
  watch_signals(options.death_descriptor);
  open_log("planner", options.log);
  ProfileRun profile(std::move(options));
  while (profile.step()) {
  }
  return profile.outcome();
}

Exit run(ReplayOptions options) {
  watch_signals(options.death_descriptor);
  open_log("planner", options.log);
  Replay(std::move(options)).run();
  return Exit::done;
}

void flush_stdout() {
  if (std::fflush(stdout) != 0) {
    throw std::system_error(errno, std::generic_category());
  }
}

Exit print(const InspectOptions& options) {
  if (!options.check) {
    inspect(options, stdout);
    return Exit::done;
  }
  const LogCheckReport report = check_log(options.log);
  fmt::print("{}", to_text(report));
  return report.violations == 0 ? Exit::done : Exit::wrong;
}

Exit print(const LogDiffOptions& options) {
  const LogDiffReport report = diff_logs(options.a, options.b, options.compared);
  fmt::print("{}", options.json ? to_json(report, options) : to_text(report, options));
  return report.difference ? Exit::wrong : Exit::done;
}

void print(const ValidateOptions& options) {
  const RunInput input = read_run_input(options.input);
  for (const RequestError& error : input.requests.errors) {
    fmt::print("line {}: {}\n", error.line.n, error.message);
  }
  fmt::print("{}, {} that {} none\n", counted(input.requests.answerable(), "request"),
             counted(std::ssize(input.requests.errors), "line"),
             input.requests.errors.size() == 1 ? "is" : "are");
}

// {"text", "add_special_tokens"} to ids, {"ids"} to a text, or {"error"}: for a caller that goes on after one.
nlohmann::json converted(const Tokenizer& tokenizer, const nlohmann::json& line) {
  try {
    if (const auto ids = line.find("ids"); ids != line.end()) {
      return tokenizer.decode(ids->get<std::vector<TokenId>>(), /*skip_special_tokens=*/false);
    }
    return tokenizer.encode(line.at("text").get<std::string>(),
                            line.value("add_special_tokens", true));
  } catch (const Failure& failure) {
    return {{"error", failure.what()}};
  } catch (const nlohmann::json::exception& wrong) {
    return {{"error", wrong.what()}};
  }
}

void print(const EncodeOptions& options) {
  const ModelConfig model = read_model_config(options.model);
  const Tokenizer tokenizer = Tokenizer::load(options.model, model.shape.vocab_size);
  for (std::string line; std::getline(std::cin, line);) {
    const nlohmann::json text = parse_json(line, "a line of input", {kMiB * 64, 8});
    if (!text.is_string() && !text.is_object()) {
      fail("a line of input is no JSON string or object");
    }
    const nlohmann::json answer = text.is_object()
                                      ? converted(tokenizer, text)
                                      : nlohmann::json(tokenizer.encode(text.get<std::string>()));
    fmt::print("{}\n", answer.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace));
    flush_stdout();  // the caller may wait for it
  }
}

void print(const PoliciesOptions& options) {
  for (const PolicyEntry& entry : policies()) {
    if (options.json) {
      const nlohmann::ordered_json line{
          {"name", entry.name}, {"description", entry.description}, {"source", entry.source}};
      fmt::print("{}\n", line.dump());
    } else {
      fmt::print("{:<15} {} [{}]\n", entry.name, entry.description, entry.source);
    }
  }
}

void print(const SimulateOptions& options) {
  const nlohmann::ordered_json result = simulation_named(options.name).run(options.machine);
  if (!options.json || options.table) {
    fmt::print("{}", to_table(result));
  }
  if (options.json) {
    fmt::print("{}\n", result.dump());
  }
}

void print(const PlanOptions& options) {
  const nlohmann::ordered_json plan =
      options.timed > 0 ? time_planning(options) : plan_run(options);
  if (!options.check_only) {
    fmt::print("{}\n", plan.dump());
  }
}

void print(const ExportOptions& options) { export_machine(options.costs, options.output); }

void print(const HelpOptions& options) { fmt::print("{}\n", options.text); }

// The other commands only print. A closed pipe is no error; an output that
// cannot be written is reported.
template <typename Command>
Exit run(const Command& command) {
  std::signal(SIGPIPE, SIG_IGN);
  if constexpr (!std::is_same_v<Command, EncodeOptions>) {  // that one's caller ends it
    end_at_signals();
  }
  Exit outcome = Exit::done;
  try {
    if constexpr (std::is_void_v<decltype(print(command))>) {
      print(command);
    } else {
      outcome = print(command);
    }
    flush_stdout();
  } catch (const std::system_error& problem) {
    if (std::ferror(stdout) == 0) {
      throw;
    }
    if (problem.code().value() != EPIPE) {
      fail(Exit::busy, "what was asked for cannot be written: {}",
           std::generic_category().message(problem.code().value()));
    }
  }
  return outcome;
}

}  // namespace

int main(int argc, char** argv) {
  // A command that execs the planner (poise inspect) passes its own name, for use in refusals.
  return run_main(std::filesystem::path(argc > 0 ? argv[0] : "").filename(), [&] {
    return std::visit([](auto&& command) { return run(std::move(command)); },
                      parse_planner_arguments(argc, argv));
  });
}
