#include "planner/costs/machine_file.h"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <utility>

#include "common/files/json.h"
#include "common/files/replace_file.h"
#include "common/trouble.h"
#include "common/weight_layout.h"

namespace poise {
namespace {

// Speeds: GB/s, TFLOP/s or GFLOP/s.
constexpr double kSlowest = 1e-6, kFastest = 1e6;
constexpr double kGflopsInTflops = 1000;

constexpr std::array<const char*, 14> kFields{
    "name",         "like",       "device",      "link_gbps", "back_gbps", "compute_tflops",
    "memory_gbps",  "gpu_memory", "host_memory", "cores",     "measured",  "gflops_per_core",
    "gpu_overhead", "host_gbps"};

void refuse_unknown(const JsonObject& object) {
  for (const auto& [name, value] : object.json().items()) {
    if (std::ranges::find(kFields, name) == kFields.end()) {
      const bool profile = std::ranges::any_of(
          profile_lines(), [&](const ProfileLine& line) { return name == line.name; });
      object.refuse(name, profile ? "is a line of a profile: name a profile with --profile, or "
                                    "export a machine from it with poise profile --export"
                                  : "is no field of a machine");
    }
  }
}

void take_speed(const JsonObject& object, const char* name, double& into) {
  if (const auto given = object.number(name, {.min = kSlowest, .max = kFastest})) {
    into = *given;
  } else if (into == 0) {
    object.refuse(name, "is missing");
  }
}

// "24GiB", "1.5TB"; nothing if it is no size.
std::optional<Bytes> size_from(std::string_view text) {
  constexpr std::pair<std::string_view, double> kUnits[] = {
      {"KiB", 1024.0}, {"MiB", 1048576.0}, {"GiB", 1073741824.0}, {"TiB", 1099511627776.0},
      {"kB", 1e3},     {"MB", 1e6},        {"GB", 1e9},           {"TB", 1e12}};
  double number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  const std::string_view unit = text.substr(static_cast<std::size_t>(end - text.data()));
  const auto known = std::ranges::find(kUnits, unit, [](const auto& one) { return one.first; });
  if (error != std::errc() || known == std::end(kUnits) || !(number >= 0 && number < kFastest)) {
    return std::nullopt;
  }
  return Bytes{static_cast<std::int64_t>(number * known->second)};
}

void take_size(const JsonObject& object, const char* name, std::int64_t least, Bytes& into) {
  const nlohmann::json* given = object.find(name);
  if (given == nullptr) {
    if (into.n < least) {
      object.refuse(name, "is missing");
    }
    return;
  }
  const auto size = given->is_string() ? size_from(given->get<std::string>())
                                       : Bytes{object.integer(name, {.min = least}).value_or(0)};
  if (!size || size->n < least) {
    object.refuse(
        name, fmt::format("must be bytes, or a size such as \"24GiB\", not {}", described(*given)));
  }
  into = *size;
}

DeviceKind device_of(const JsonObject& object, DeviceKind otherwise) {
  const auto text = object.string("device");
  if (!text) {
    return otherwise;
  }
  const auto kind = device_kind_from(*text);
  if (!kind) {
    object.refuse("device", fmt::format("must be cpu or cuda, not {}", shown(*text)));
  }
  return *kind;
}

// The machine that the description changes; one without constants if it names none.
Machine base_of(const JsonObject& object) {
  const auto like = object.string("like");
  if (!like) {
    return {};
  }
  const auto found = std::ranges::find(machines(), *like, &Machine::name);
  if (found == machines().end()) {
    object.refuse("like", fmt::format("must be one of {}, not {}", machine_names(), shown(*like)));
  }
  return *found;
}

void take_compute(const JsonObject& object, Machine& machine) {
  const auto cores = object.integer("cores", {.min = 1, .max = 1 << 20});
  if (!cores) {
    if (object.has("gflops_per_core")) {
      object.refuse("cores", "is missing beside gflops_per_core");
    }
    take_speed(object, "compute_tflops", machine.compute);
    return;
  }
  if (machine.kind != DeviceKind::cpu || object.has("compute_tflops")) {
    object.refuse("cores",
                  "is for \"device\": \"cpu\", with gflops_per_core in place of "
                  "compute_tflops");
  }
  double each = 0;
  take_speed(object, "gflops_per_core", each);
  machine.compute = each * static_cast<double>(*cores) / kGflopsInTflops;
}

double clamped(double speed) { return std::clamp(speed, kSlowest, kFastest); }

// `each` times n, a second, at the largest measured n; nothing where that takes no time. `starts`: the
// line's constant part, of each start, does not count, as far as it is half of the time.
std::optional<double> rate(const Line& line, double each, bool starts) {
  const double n = line.points.empty() ? 1e6 : line.points.back().n;
  const double whole = line(n).n;
  const double time = starts ? std::max(whole - line.a, whole / 2) : whole;
  return time > 0 ? std::optional(each * n / time) : std::nullopt;
}

}  // namespace

MachineDescription read_machine(const std::filesystem::path& path) {
  const nlohmann::json json = read_json_file(path);
  const JsonObject object(json, path.string());
  refuse_unknown(object);
  MachineDescription made{.machine = base_of(object), .measured = {}};
  Machine& machine = made.machine;
  machine.name = object.string("name").value_or("");
  if (machine.name.empty()) {
    object.refuse("name", "is missing");
  }
  machine.kind = device_of(object, machine.kind);
  machine.gpu_overhead = machine.kind == DeviceKind::cpu ? Bytes{0} : machine.gpu_overhead;
  take_speed(object, "link_gbps", machine.link);
  machine.back = machine.back == 0 ? machine.link : machine.back;
  take_speed(object, "back_gbps", machine.back);
  take_speed(object, "memory_gbps", machine.memory);
  take_compute(object, machine);
  if (object.has("host_gbps")) {
    machine.host = 0;
    take_speed(object, "host_gbps", machine.host);
  }
  take_size(object, "gpu_memory", 1, machine.gpu_memory);
  take_size(object, "host_memory", 1, machine.host_memory);
  take_size(object, "gpu_overhead", 0, machine.gpu_overhead);
  if (const nlohmann::json* measured = object.find("measured")) {
    made.measured = profile_from(JsonObject(*measured, path.string() + ": measured"));
    made.measured->gpu_memory = machine.gpu_memory;
    made.measured->gpu_overhead = machine.gpu_overhead;
    made.measured->host_memory = machine.host_memory;
  }
  return made;
}

void write_machine(const std::filesystem::path& path, const MachineDescription& description) {
  const Machine& machine = description.machine;
  nlohmann::ordered_json json{{"name", machine.name},
                              {"device", name_of(machine.kind)},
                              {"link_gbps", machine.link},
                              {"back_gbps", machine.back},
                              {"compute_tflops", machine.compute},
                              {"memory_gbps", machine.memory},
                              {"gpu_memory", machine.gpu_memory.n},
                              {"gpu_overhead", machine.gpu_overhead.n},
                              {"host_memory", machine.host_memory.n}};
  if (machine.host > 0) {
    json["host_gbps"] = machine.host;
  }
  if (description.measured) {
    json["measured"] = json_of(*description.measured);
  }
  replace_file(path, json.dump(2) + '\n', {.shared = true});
}

MachineDescription machine_of(const Profile& measured, const ModelShape& shape, DType dtype,
                              KvFormat kv_format) {
  constexpr double kGiga = 1e9, kTera = 1e12;
  const WeightLayout layout = weight_layout(shape, dtype);
  const BlockSizes sizes = block_sizes(shape, dtype, kv_format);
  double weights = 0;
  for (const WeightEntry& entry : layout.layer.entries) {
    weights += entry.matrix() ? static_cast<double>(entry.rows) * entry.cols : 0;
  }
  const auto bytes = [](Bytes size) { return static_cast<double>(size.n) / kGiga; };
  const auto of_weights = rate(measured.load_w, bytes(layout.layer.bytes), true);
  const auto of_blocks = rate(measured.load_kv, bytes(sizes.block(BlockKind::kv)), true);
  const double link =
      std::max(of_weights.value_or(of_blocks.value_or(kFastest)), of_blocks.value_or(kSlowest));
  const double back = rate(measured.store_kv, bytes(sizes.row(BlockKind::kv)), true).value_or(link);
  const double compute = rate(measured.forward, 2 * weights / kTera, false).value_or(kFastest);
  const double memory =
      rate(measured.attention, bytes(moved_by_attention(shape, dtype, kv_format)), true)
          .value_or(kFastest);
  return {.machine = {.name = measured.name,
                      .link = clamped(link),
                      .back = clamped(back),
                      .compute = clamped(compute),
                      .memory = clamped(memory),
                      .gpu_memory = measured.gpu_memory,
                      .host_memory = measured.host_memory,
                      .kind = measured.kind,
                      .gpu_overhead = measured.gpu_overhead,
                      .host = measured.knows_host()
                                  ? clamped(rate(measured.host_attention,
                                                 bytes(sizes.block(BlockKind::kv)), true)
                                                .value_or(kFastest))
                                  : 0},
          .measured = measured};
}

MachineDescription find_machine(const std::string& machine) {
  const auto named = std::ranges::find(machines(), machine, &Machine::name);
  if (named != machines().end()) {
    return {.machine = *named, .measured = {}};
  }
  if (!std::filesystem::exists(machine)) {
    fail("--machine {}: there is no such file and no such machine; there are {}", shown(machine),
         machine_names());
  }
  return read_machine(machine);
}

Profile costs_on(const std::string& machine, const ModelShape& shape, DType dtype,
                 KvFormat kv_format) {
  MachineDescription found = find_machine(machine);
  if (found.measured && found.measured->model == model_fingerprint(shape, dtype, kv_format)) {
    return *std::move(found.measured);
  }
  return profile_of(found.machine, shape, dtype, kv_format);
}

}  // namespace poise
