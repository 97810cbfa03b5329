#include "planner/tokenizer/pattern_program.h"

#include <algorithm>
#include <utility>

#include "common/files/regular_file.h"
#include "common/trouble.h"

namespace poise {
namespace {

using Op = Instruction::Op;
using Kind = PatternNode::Kind;

constexpr std::size_t kLargestProgram = 4096;
static_assert(kLargestProgram <= UINT16_MAX, "Ways hold places in a program");

bool can_be_empty(const PatternNode& node) {
  switch (node.kind) {
    case Kind::set:
      return false;
    case Kind::sequence:
    case Kind::atomic:
      return std::all_of(node.children.begin(), node.children.end(), can_be_empty);
    case Kind::choice:
      return std::any_of(node.children.begin(), node.children.end(), can_be_empty);
    case Kind::repeat:
      return node.least == 0 || can_be_empty(node.children.front());
    case Kind::look_ahead:
    case Kind::no_look_ahead:
      return true;
  }
  return true;
}

class Compiler {
 public:
  explicit Compiler(PatternProgram& program) : program_(program) {}

  void emit(const PatternNode& node) {
    switch (node.kind) {
      case Kind::set:
        add(Op::one).set = add_set(node);
        break;
      case Kind::sequence:
        for (const PatternNode& child : node.children) {
          emit(child);
        }
        break;
      case Kind::choice:
        emit_choice(node);
        break;
      case Kind::repeat:
        emit_repeat(node);
        break;
      case Kind::atomic:
        emit_body(Op::atomic, node.children.front());
        break;
      case Kind::look_ahead:
      case Kind::no_look_ahead: {
        const std::size_t look = here();
        emit_body(Op::look, node.children.front());
        program_.code[look].negative = node.kind == Kind::no_look_ahead;
        break;
      }
    }
  }

  Instruction& add(Op op) {
    if (program_.code.size() >= kLargestProgram) {
      fail("{}: the pattern {} is too large", program_.what, shown(program_.expression, 120));
    }
    program_.code.emplace_back().op = op;
    return program_.code.back();
  }

 private:
  std::uint32_t here() const { return static_cast<std::uint32_t>(program_.code.size()); }

  std::uint32_t add_set(const PatternNode& node) {
    program_.sets.push_back(*node.set);
    return static_cast<std::uint32_t>(program_.sets.size() - 1);
  }

  void emit_choice(const PatternNode& node) {
    std::vector<std::uint32_t> ends;
    for (std::size_t n = 0; n < node.children.size(); ++n) {
      const bool last = n + 1 == node.children.size();
      const std::uint32_t fork = here();
      if (!last) {
        add(Op::fork).target = fork + 1;
      }
      emit(node.children[n]);
      if (!last) {
        ends.push_back(here());
        add(Op::jump);
        program_.code[fork].other = here();
      }
    }
    for (const std::uint32_t end : ends) {
      program_.code[end].target = here();
    }
  }

  void emit_body(Op op, const PatternNode& body) {
    const std::uint32_t start = here();
    add(op);
    emit(body);
    add(Op::accept);
    program_.code[start].target = here();
  }

  void emit_repeat(const PatternNode& node) {
    const PatternNode& child = node.children.front();
    if (child.kind == Kind::set) {
      const std::uint32_t set = add_set(child);
      Instruction& run = add(Op::run);
      run.set = set;
      run.least = node.least;
      run.most = node.most;
      run.greed = node.greed;
      return;
    }
    if (can_be_empty(child)) {
      fail("{}: the pattern {} repeats what may be empty; write it without", program_.what,
           shown(program_.expression, 120));
    }
    const std::uint32_t start = here();
    if (node.greed == Greed::possessive) {
      add(Op::atomic);
    }
    emit_copies(node, child);
    if (node.greed == Greed::possessive) {
      add(Op::accept);
      program_.code[start].target = here();
    }
  }

  void emit_copies(const PatternNode& node, const PatternNode& child) {
    for (std::uint32_t n = 0; n < node.least; ++n) {
      emit(child);
    }
    if (node.most == kUnlimited) {
      const std::uint32_t fork = here();
      add(Op::fork);
      emit(child);
      add(Op::jump).target = fork;
      set_fork(fork, node.greed);
      return;
    }
    std::vector<std::uint32_t> forks;
    for (std::uint32_t n = node.least; n < node.most; ++n) {
      forks.push_back(here());
      add(Op::fork);
      emit(child);
    }
    for (const std::uint32_t fork : forks) {
      set_fork(fork, node.greed);
    }
  }

  // Into the body just behind the fork, or past everything emitted so far.
  void set_fork(std::uint32_t fork, Greed greed) {
    Instruction& instruction = program_.code[fork];
    instruction.target = fork + 1;
    instruction.other = here();
    if (greed == Greed::lazy) {
      std::swap(instruction.target, instruction.other);
    }
  }

  PatternProgram& program_;
};

// Fills program.next. A byte that is missing there can be skipped over without trying.
class NextByteFinder {
 public:
  explicit NextByteFinder(PatternProgram& program)
      : program_(program), state_(program.code.size(), State::unknown) {
    program_.next.resize(program.code.size());
    for (std::size_t n = 0; n < program.code.size(); ++n) {
      find(n);
    }
  }

 private:
  enum class State : std::uint8_t { unknown, busy, known };

  NextBytes find(std::size_t at) {
    if (state_[at] == State::known) {
      return program_.next[at];
    }
    if (state_[at] == State::busy) {
      return NextBytes().set();  // a way back to here that eats nothing: anything may follow
    }
    state_[at] = State::busy;
    const Instruction& instruction = program_.code[at];
    NextBytes bytes;
    switch (instruction.op) {
      case Op::accept:
        bytes.set();
        break;
      case Op::one:
        bytes = of_set(instruction.set);
        break;
      case Op::run:
        bytes = of_set(instruction.set);
        if (instruction.least == 0) {
          bytes |= find(at + 1);
        }
        break;
      case Op::fork:
        bytes = find(instruction.target) | find(instruction.other);
        break;
      case Op::jump:
      case Op::look:
        bytes = find(instruction.target);
        break;
      case Op::atomic:
        bytes = find(at + 1);
        break;
    }
    state_[at] = State::known;
    return program_.next[at] = bytes;
  }

  NextBytes of_set(std::uint32_t set) const {
    NextBytes bytes;
    for (unsigned byte = 0; byte < 256; ++byte) {
      bytes[byte] = byte >= 0x80 || program_.sets[set].contains(byte);
    }
    return bytes;
  }

  PatternProgram& program_;
  std::vector<State> state_;
};

// A choice of many is a chain of forks; with the next byte known, the forks that cannot match fall
// out of it.
void resolve_forks(PatternProgram& program) {
  for (Instruction& start : program.code) {
    if (start.op != Op::fork) {
      continue;
    }
    start.ways = static_cast<std::uint32_t>(program.ways.size());
    auto& ways = program.ways.emplace_back();
    for (std::size_t byte = 0; byte <= kEndOfText; ++byte) {
      const Instruction* fork = &start;
      while (!program.next[fork->target][byte] && program.code[fork->other].op == Op::fork) {
        fork = &program.code[fork->other];
      }
      const bool one = program.next[fork->target][byte];
      const bool other = program.next[fork->other][byte];
      ways[byte] = {static_cast<std::uint16_t>(one ? fork->target : fork->other),
                    static_cast<std::uint16_t>(one && other ? fork->other : 0)};
    }
  }
}

}  // namespace

PatternProgram compile_program(std::string_view expression, const std::string& what) {
  PatternProgram program;
  program.expression = expression;
  program.what = what;
  Compiler compiler(program);
  compiler.emit(parse_pattern(expression, what));
  compiler.add(Op::accept);
  NextByteFinder{program};
  resolve_forks(program);
  return program;
}

}  // namespace poise
