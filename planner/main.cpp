#include <fmt/core.h>

#include <cstdio>
#include <nlohmann/json.hpp>

#include "common/process.h"
#include "planner/inspect.h"
#include "planner/options.h"
#include "planner/planner.h"

namespace {

using namespace poise;

Exit run(RunOptions options) {
  watch_signals(options.death_descriptor);
  open_log("planner", options.log);
  Planner planner(std::move(options));
  while (planner.step()) {
  }
  fmt::print("{}\n", planner.summary());
  return planner.outcome();
}

Exit run(const InspectOptions& options) {
  inspect(options, stdout);
  return Exit::done;
}

Exit run(const ValidateOptions& options) {
  const RunInput input = read_run_input(options.input);
  for (const RequestError& error : input.requests.errors) {
    fmt::print("line {}: {}\n", error.line.n, error.message);
  }
  fmt::print("{} requests, {} lines that are none\n", input.requests.requests.size(),
             input.requests.errors.size());
  return Exit::done;
}

Exit run(const PoliciesOptions& options) {
  for (const PolicyEntry& entry : policies()) {
    if (options.json) {
      const nlohmann::ordered_json line{
          {"name", entry.name}, {"description", entry.description}, {"source", entry.source}};
      fmt::print("{}\n", line.dump());
    } else {
      fmt::print("{:<10} {} [{}]\n", entry.name, entry.description, entry.source);
    }
  }
  return Exit::done;
}

Exit run(const HelpOptions& options) {
  fmt::print("{}\n", options.text);
  return Exit::done;
}

}  // namespace

int main(int argc, char** argv) {
  return run_main("poise-planner", [&] {
    return std::visit([](auto&& command) { return run(std::move(command)); },
                      parse_planner_arguments(argc, argv));
  });
}
