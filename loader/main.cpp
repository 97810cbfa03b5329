#include <spdlog/spdlog.h>

#include <cstdio>
#include <optional>
#include <string>

#include "common/arguments.h"
#include "common/files/regular_file.h"
#include "common/process.h"
#include "loader/loader.h"
#include "loader/loading_speed.h"

namespace {

using namespace poise;

cxxopts::Options described_options() {
  cxxopts::Options options("poise-loader", "Reads a model into shared memory and keeps it there.");
  options.add_options()                                                                     //
      ("model", "HuggingFace model directory", cxxopts::value<std::string>())               //
      ("home", "directory for loader.sock and loader.json", cxxopts::value<std::string>())  //
      ("run-id", "names the shared memory segments", cxxopts::value<std::string>())         //
      ("dtype", "auto, float32, float16, bfloat16",
       cxxopts::value<std::string>()->default_value("auto"))  //
      ("quantization", "auto, none, int8, int4",
       cxxopts::value<std::string>()->default_value("auto"))                                //
      ("pack-weights", "auto, off", cxxopts::value<std::string>()->default_value("off"))    //
      ("load-format", "auto, dummy", cxxopts::value<std::string>()->default_value("auto"))  //
      ("seed", "of dummy weights", cxxopts::value<std::uint64_t>()->default_value("0"))     //
      ("host-memory", "cap in bytes", cxxopts::value<std::int64_t>())                       //
      ("log", "log file", cxxopts::value<std::string>()->default_value(""))                 //
      ("adopt", "take over the memory of this run's loader, which has ended")               //
      ("death-fd", "pipe that ends with the supervisor",
       cxxopts::value<int>()->default_value("-1"))                                  //
      ("validate-only", "check the model directory and end")                        //
      ("needs", "check the model directory, print what it needs as JSON, and end")  //
      ("kv-cache-dtype", "auto, int8, int4: for needs",
       cxxopts::value<std::string>()->default_value("auto"))                              //
      ("measure", "how fast its files can be read and digested here, as JSON; then end")  //
      ("help", "say this");
  return options;
}

LoaderOptions loader_options(const cxxopts::ParseResult& given) {
  LoaderOptions options{.model = required_argument(given, "model")};
  const std::string dtype = given["dtype"].as<std::string>();
  if (dtype != "auto") {
    options.dtype = dtype_from(dtype);
    if (!options.dtype) {
      fail("--dtype must be auto, float32, float16 or bfloat16, not {}", shown(dtype));
    }
  }
  const std::string quantization = given["quantization"].as<std::string>();
  const auto asked = quantization_from(quantization);
  if (!asked) {
    fail("--quantization must be auto, none, int8 or int4, not {}", shown(quantization));
  }
  options.quantization = *asked;
  const std::string packing = given["pack-weights"].as<std::string>();
  const auto pack = pack_weights_from(packing);
  if (!pack) {
    fail("--pack-weights must be auto or off, not {}", shown(packing));
  }
  options.pack_weights = *pack;
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

// With `kv_format`, what the model needs is printed.
Exit validate(const LoaderOptions& options, std::optional<KvFormat> kv_format) {
  const ModelOnDisk model = open_model(options.model, load_options(options));
  for (const std::string& notice : model.notices) {
    std::fprintf(stderr, "poise-loader: warning: %s\n", notice.c_str());
  }
  if (kv_format) {
    std::printf("%s\n", needs_json(model, *kv_format).c_str());
  }
  return Exit::done;
}

Exit serve_planners(const LoaderOptions& options) {
  Loader loader(options);
  while (!stop_requested()) {
    if (hand_over_requested() && loader.can_leave()) {
      loader.leave();
      return Exit::handed_over;
    }
    if (!loader.step()) {
      break;
    }
  }
  return Exit::done;
}

Exit run(int argc, char** argv) {
  cxxopts::Options described = described_options();
  const cxxopts::ParseResult given = parse_arguments(described, with_hyphens(argc, argv));
  if (given.count("help") > 0) {
    std::printf("%s", described.help().c_str());
    return Exit::done;
  }
  LoaderOptions options = loader_options(given);
  if (given.count("validate-only") > 0) {
    return validate(options, std::nullopt);
  }
  if (given.count("needs") > 0) {
    const std::string kept = given["kv-cache-dtype"].as<std::string>();
    const auto kv_format = kv_format_from(kept);
    if (!kv_format) {
      fail("--kv-cache-dtype must be auto, int8 or int4, not {}", shown(kept));
    }
    return validate(options, kv_format);
  }
  if (given.count("measure") > 0) {
    std::printf("%s\n", to_json(measure_loading(options.model)).c_str());
    return Exit::done;
  }
  options.home = required_argument(given, "home");
  options.run_id = required_argument(given, "run-id");
  options.adopt = given.count("adopt") > 0;
  watch_signals(given["death-fd"].as<int>(), EndsFor::supervisor);
  open_log("loader", given["log"].as<std::string>());
  return serve_planners(options);
}

}  // namespace

int main(int argc, char** argv) {
  return poise::run_main("poise-loader", [&] { return run(argc, argv); });
}
