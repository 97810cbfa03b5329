#pragma once
// What everything costs on a machine, as the planner computes with it: straight lines in the number
// of blocks or rows, for one decoder layer of one model (CAPTURE section IV-C; both papers fit them
// with R² of 0.99). A profile is fitted to measured points, or made from a named machine's few
// constants. Pure functions but for those that read and write a profile's file.

#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "common/blocks.h"
#include "common/model_shape.h"
#include "common/units.h"

namespace poise {

// T(n) = a + b · n seconds; r2 says how well it fits the points it was fitted to. T(0) is 0: what
// has nothing to do is not begun.
struct Line {
  double a = 0;
  double b = 0;
  double r2 = 1;

  Seconds operator()(double n) const { return {n > 0 ? a + b * n : 0}; }
  // The n that takes so long; 0 where even the first takes longer. REQUIRES: b > 0.
  double find(Seconds time) const;

  friend bool operator==(const Line&, const Line&) = default;
};

struct Point {
  double n;
  Seconds time;

  friend bool operator==(const Point&, const Point&) = default;
};
// Least squares; with a single n among the points, the line through 0. An `a` below 0 is none: the
// line is then fitted through 0, too. One that would fall is level. REQUIRES: a point with n > 0.
Line fit_line(std::span<const Point> points);

// What a line was fitted to. Each point is the median of all times measured for its n.
struct MeasuredLine {
  std::string name;             // of the line, as in the file
  std::vector<Point> points;    // while the other streams worked, too
  std::vector<Point> alone;     // while they rested; empty where that never was
  Line alone_line;              // through those
  std::int32_t remeasured = 0;  // points that lay far off and were measured again

  friend bool operator==(const MeasuredLine&, const MeasuredLine&) = default;
};

struct Profile {
  std::string name;         // the machine's
  std::string fingerprint;  // of the machine and the model that it holds for
  std::string model;        // of the model alone

  Line load_w;        // T_load_w: n is the share of a layer's weights, 1 the whole layer
  Line load_kv;       // T_load_kv(blocks), over the link
  Line load_act;      // T_load_act(blocks), over the link
  Line load_here;     // of so many ACT blocks that stay on the device
  Line kv_gen;        // T_kv_gen(blocks)
  Line attention;     // decode attention over so many blocks, wherever K and V came from
  Line prefill;       // a prompt's attention: n counts pairs of a new row and a row that it sees
  Line forward;       // a layer's other products for so many rows
  Line qkv;           // of `forward`, what comes before attention
  Line embed;         // of so many rows
  Line head;          // final norm, head and sampling for so many rows
  Line store_kv;      // of so many new rows, the other way over the link
  Line store_act;     // likewise
  Seconds between{};  // from an iteration's results to the next one's first work
  Bytes gpu_memory;
  Bytes gpu_overhead;  // of it, beside the buffers: context, libraries
  Bytes host_memory;
  std::vector<MeasuredLine> measured;  // empty: of constants

  friend bool operator==(const Profile&, const Profile&) = default;
};

// A profile's lines by their names in its file, and what they count.
struct ProfileLine {
  const char* name;
  const char* unit;
  Line Profile::*line;
};
std::span<const ProfileLine> profile_lines();

// A machine by its constants.
struct Machine {
  std::string_view name;
  double link = 0;     // GB/s, to the device
  double back = 0;     // GB/s, from it at the same time
  double compute = 0;  // TFLOP/s that the model's products reach
  double memory = 0;   // GB/s of the device's memory that attention reaches
  Bytes gpu_memory;
  Bytes host_memory;
};
std::span<const Machine> machines();
// Fails with the names there are.
const Machine& machine_named(std::string_view name);

Profile profile_of(const Machine& machine, const ModelShape& shape, DType dtype);
// Changes with the machine, with any size of the model and with how numbers are kept.
std::string profile_fingerprint(std::string_view machine, const ModelShape& shape, DType dtype);
// The same without the machine.
std::string model_fingerprint(const ModelShape& shape, DType dtype);

void write_profile(const std::filesystem::path& path, const Profile& profile);
// Fails, naming file and field, where it is no profile.
Profile read_profile(const std::filesystem::path& path);
// Nothing where the file is not there or holds for another machine or model; fails where it is there
// and is no profile.
std::optional<Profile> read_profile(const std::filesystem::path& path,
                                    std::string_view fingerprint);
// Of a file that the user named: fails where it is of another model.
Profile read_profile_of(const std::filesystem::path& path, const ModelShape& shape, DType dtype);

}  // namespace poise
