#include <spdlog/spdlog.h>

#include <algorithm>
#include <cstdio>
#include <cxxopts.hpp>
#include <string>
#include <vector>

#include "common/process.h"
#include "common/regular_file.h"
#include "loader/loader.h"

namespace {

using namespace poise;

cxxopts::Options described_options() {
  cxxopts::Options options("poise-loader", "Reads a model into shared memory and keeps it there.");
  options.add_options()                                                                     //
      ("model", "HuggingFace model directory", cxxopts::value<std::string>())               //
      ("home", "directory for loader.sock and loader.json", cxxopts::value<std::string>())  //
      ("run-id", "names the shared memory segments", cxxopts::value<std::string>())         //
      ("dtype", "auto, float32, float16, bfloat16",
       cxxopts::value<std::string>()->default_value("auto"))                                //
      ("load-format", "auto, dummy", cxxopts::value<std::string>()->default_value("auto"))  //
      ("seed", "of dummy weights", cxxopts::value<std::uint64_t>()->default_value("0"))     //
      ("host-memory", "cap in bytes", cxxopts::value<std::int64_t>())                       //
      ("log", "log file", cxxopts::value<std::string>()->default_value(""))                 //
      ("death-fd", "pipe that ends with the supervisor",
       cxxopts::value<int>()->default_value("-1"))            //
      ("validate-only", "check the model directory and end")  //
      ("help", "say this");
  return options;
}

// Underscores pass for hyphens in the names of options, as in vLLM.
std::vector<std::string> with_hyphens(int argc, char** argv) {
  std::vector<std::string> arguments(argv, argv + argc);
  for (std::string& argument : arguments) {
    if (argument.starts_with("--")) {
      const auto end = argument.begin() +
                       static_cast<std::ptrdiff_t>(std::min(argument.find('='), argument.size()));
      std::replace(argument.begin(), end, '_', '-');
    }
  }
  return arguments;
}

cxxopts::ParseResult parse(cxxopts::Options& options, int argc, char** argv) {
  const std::vector<std::string> arguments = with_hyphens(argc, argv);
  std::vector<const char*> pointers;
  for (const std::string& argument : arguments) {
    pointers.push_back(argument.c_str());
  }
  try {
    cxxopts::ParseResult given = options.parse(argc, pointers.data());
    if (!given.unmatched().empty()) {
      fail("{} is no option; --help lists them", shown(given.unmatched().front()));
    }
    return given;
  } catch (const cxxopts::exceptions::exception& problem) {
    fail("{}; --help lists the options", problem.what());
  }
}

std::string required(const cxxopts::ParseResult& given, const std::string& name) {
  if (given.count(name) == 0) {
    fail("--{} is needed; --help lists the options", name);
  }
  return given[name].as<std::string>();
}

LoaderOptions loader_options(const cxxopts::ParseResult& given) {
  LoaderOptions options{.model = required(given, "model")};
  const std::string dtype = given["dtype"].as<std::string>();
  if (dtype != "auto") {
    options.dtype = dtype_from(dtype);
    if (!options.dtype) {
      fail("--dtype must be auto, float32, float16 or bfloat16, not {}", shown(dtype));
    }
  }
  const std::string format = given["load-format"].as<std::string>();
  if (format != "auto" && format != "safetensors" && format != "dummy") {
    fail("--load-format must be auto or dummy, not {}", shown(format));
  }
  options.load_format = format == "dummy" ? LoadFormat::dummy : LoadFormat::from_files;
  options.seed = given["seed"].as<std::uint64_t>();
  if (given.count("host-memory") > 0) {
    options.host_memory = Bytes{given["host-memory"].as<std::int64_t>()};
  }
  return options;
}

Exit validate(const LoaderOptions& options) {
  const ModelOnDisk model =
      open_model(options.model, options.dtype, options.load_format, options.seed);
  for (const std::string& notice : model.notices) {
    std::fprintf(stderr, "poise-loader: warning: %s\n", notice.c_str());
  }
  return Exit::done;
}

Exit run(int argc, char** argv) {
  cxxopts::Options described = described_options();
  const cxxopts::ParseResult given = parse(described, argc, argv);
  if (given.count("help") > 0) {
    std::printf("%s", described.help().c_str());
    return Exit::done;
  }
  LoaderOptions options = loader_options(given);
  if (given.count("validate-only") > 0) {
    return validate(options);
  }
  options.home = required(given, "home");
  options.run_id = required(given, "run-id");
  watch_signals(given["death-fd"].as<int>());
  open_log("loader", given["log"].as<std::string>());
  Loader loader(options);
  while (!stop_requested() && loader.step()) {
  }
  return Exit::done;
}

}  // namespace

int main(int argc, char** argv) {
  return poise::run_main("poise-loader", [&] { return run(argc, argv); });
}
