#include <fmt/core.h>

#include <cstdio>
#include <iostream>
#include <nlohmann/json.hpp>
#include <string>

#include "common/json_file.h"
#include "common/model_config.h"
#include "common/process.h"
#include "common/trouble.h"
#include "planner/inspect.h"
#include "planner/options.h"
#include "planner/planner.h"
#include "planner/tokenizer/tokenizer.h"

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

Exit run(const EncodeOptions& options) {
  const ModelConfig model = read_model_config(options.model);
  const Tokenizer tokenizer = Tokenizer::load(options.model, model.shape.vocab_size);
  for (std::string line; std::getline(std::cin, line);) {
    const nlohmann::json text = parse_json(line, "a line of input");
    if (!text.is_string()) {
      fail("a line of input is no JSON string");
    }
    fmt::print("{}\n", nlohmann::json(tokenizer.encode(text.get<std::string>())).dump());
    std::fflush(stdout);  // whoever asks may wait for it
  }
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
