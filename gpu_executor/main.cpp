#include <sys/prctl.h>

#include <cstdio>
#include <string>

#include "common/arguments.h"
#include "common/process.h"
#include "gpu_executor/executor.h"
#include "gpu_executor/open_device.h"

namespace {

using namespace poise;

cxxopts::Options described_options() {
  cxxopts::Options options("poise-gpu-executor", "Runs a planner's orders on a device.");
  options.add_options()                                                                    //
      ("run-id", "names the shared memory segments", cxxopts::value<std::string>())        //
      ("planner-socket", "socket the planner serves", cxxopts::value<std::string>())       //
      ("device", "auto, cpu, cuda", cxxopts::value<std::string>()->default_value("auto"))  //
      ("gpu-memory", "cap on the device's memory, bytes",
       cxxopts::value<std::int64_t>()->default_value("0"))                         //
      ("threads", "of the CPU device", cxxopts::value<int>()->default_value("0"))  //
      ("link-gbps", "speed of the CPU device's link, 10^9 bytes a second",
       cxxopts::value<double>()->default_value("0"))  //
      ("compute-gflops", "speed of the CPU device's arithmetic",
       cxxopts::value<double>()->default_value("0"))  //
      ("host-threads", "that attend on host cores",
       cxxopts::value<int>()->default_value("0"))  //
      ("host-gbps", "speed at which these read, 10^9 bytes a second",
       cxxopts::value<double>()->default_value("0"))  //
      ("after-death",
       "the executor before this one died without having been asked to")     //
      ("log", "log file", cxxopts::value<std::string>()->default_value(""))  //
      ("death-fd", "pipe that ends with the supervisor",
       cxxopts::value<int>()->default_value("-1"))  //
      ("help", "say this");
  return options;
}

Exit run(int argc, char** argv) {
  cxxopts::Options described = described_options();
  const cxxopts::ParseResult given = parse_arguments(described, with_hyphens(argc, argv));
  if (given.count("help") > 0) {
    std::printf("%s", described.help().c_str());
    return Exit::done;
  }
  const std::string socket = required_argument(given, "planner-socket");
  const Bytes gpu_memory{given["gpu-memory"].as<std::int64_t>()};
  if (gpu_memory.n < 0) {
    fail("--gpu-memory is {}: it must be a positive number of bytes", gpu_memory.n);
  }
  watch_signals(given["death-fd"].as<int>(), EndsFor::supervisor);
  open_log("gpu_executor", given["log"].as<std::string>());
  // A GPU is asked every 20 µs whether it is done, and a set speed is kept by sleeping: neither bears the
  // 50 µs that the kernel may wake a sleeper late. Threads have it from the one that starts them.
  constexpr unsigned long kLate = 1;                   // ns
  static_cast<void>(prctl(PR_SET_TIMERSLACK, kLate));  // without it, only slower
  auto device = open_device({.device = given["device"].as<std::string>(),
                             .threads = given["threads"].as<int>(),
                             .link_gbps = given["link-gbps"].as<double>(),
                             .compute_gflops = given["compute-gflops"].as<double>(),
                             .host_threads = given["host-threads"].as<int>(),
                             .host_gbps = given["host-gbps"].as<double>()});
  Executor executor({.run_id = required_argument(given, "run-id"),
                     .gpu_memory = gpu_memory,
                     .after_death = given.count("after-death") > 0},
                    std::move(device),
                    [&](const Identity& identity) { return connect(socket, identity); });
  while (executor.step()) {
    if (stop_requested()) {
      executor.stop();
    }
  }
  return stop_requested() ? Exit::interrupted : Exit::done;
}

}  // namespace

int main(int argc, char** argv) {
  return poise::run_main("poise-gpu-executor", [&] { return run(argc, argv); });
}
