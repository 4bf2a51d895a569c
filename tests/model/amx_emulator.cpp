// Runs AMX's tile instructions on a processor without them: a handler of SIGILL decodes the instruction and does what
// Intel's manual says, then continues after it. For tests of code that was compiled for AMX.

#include <signal.h>
#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

struct Tiles {
  uint8_t palette, start_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
  uint8_t data[8][16][64];
};
thread_local Tiles tiles;
long executed = 0;

float flushed(float x) { return std::fabs(x) < 1.17549435e-38f ? std::copysign(0.0f, x) : x; }

float bfloat16(const uint8_t* p) {
  uint32_t bits = (uint32_t)p[1] << 24 | (uint32_t)p[0] << 16;
  float x;
  std::memcpy(&x, &bits, 4);
  return flushed(x);
}

// TDPBF16PS.
void dot_bfloat16(int sum, int a, int b) {
  for (int m = 0; m < tiles.rows[sum]; ++m)
    for (int n = 0; n < tiles.row_bytes[sum] / 4; ++n) {
      float part[2] = {0, 0}, total;
      for (int k = 0; k < tiles.row_bytes[a] / 4; ++k)
        for (int i = 0; i < 2; ++i)
          part[i] = flushed(std::fma(bfloat16(&tiles.data[a][m][4 * k + 2 * i]),
                                     bfloat16(&tiles.data[b][k][4 * n + 2 * i]), part[i]));
      std::memcpy(&total, &tiles.data[sum][m][4 * n], 4);
      total = flushed(flushed(total) + flushed(part[0] + part[1]));
      std::memcpy(&tiles.data[sum][m][4 * n], &total, 4);
    }
}

// TDPBSUD: signed bytes of a, unsigned ones of b.
void dot_bytes(int sum, int a, int b) {
  for (int m = 0; m < tiles.rows[sum]; ++m)
    for (int n = 0; n < tiles.row_bytes[sum] / 4; ++n) {
      int32_t total;
      std::memcpy(&total, &tiles.data[sum][m][4 * n], 4);
      for (int k = 0; k < tiles.row_bytes[a] / 4; ++k)
        for (int i = 0; i < 4; ++i) total += (int8_t)tiles.data[a][m][4 * k + i] * tiles.data[b][k][4 * n + i];
      std::memcpy(&tiles.data[sum][m][4 * n], &total, 4);
    }
}

// A VEX instruction of three prefix bytes with its operands decoded.
struct Instruction {
  const uint8_t* at;
  greg_t* registers;
  int prefix() const { return at[2] & 3; }  // 0 none, 1 66, 2 F3, 3 F2
  int opcode() const { return at[3]; }
  int mod() const { return at[4] >> 6; }
  int reg() const { return at[4] >> 3 & 7; }
  int rm() const { return at[4] & 7; }
  int third() const { return ~at[2] >> 3 & 15; }
  bool is_tile() const { return at[0] == 0xC4 && (at[1] & 31) == 2 && (at[2] & 0x84) == 0; }

  greg_t value(int number) const {
    static const int kOrder[] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                                 REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};
    return registers[kOrder[number]];
  }

  // Address of a memory operand, its index register times the scale, and the instruction's length.
  void memory(greg_t* base, greg_t* index, int* length) const {
    const int extended_base = (at[1] & 0x20) ? 0 : 8, extended_index = (at[1] & 0x40) ? 0 : 8;
    int size = 5, number = rm();
    *base = *index = 0;
    bool displacement_only = false;
    if (rm() == 4) {
      const uint8_t sib = at[size++];
      number = sib & 7;
      const int index_number = (sib >> 3 & 7) + extended_index;
      if (index_number != 4) *index = value(index_number) << (sib >> 6);
      displacement_only = number == 5 && mod() == 0;
    }
    const bool relative = rm() == 5 && mod() == 0;
    if (!displacement_only && !relative) *base = value(number + extended_base);
    if (mod() == 1) {
      *base += (int8_t)at[size++];
    } else if (mod() == 2 || displacement_only || relative) {
      int32_t displacement;
      std::memcpy(&displacement, at + size, 4);
      size += 4;
      *base += displacement;
    }
    if (relative) *base += (greg_t)(at + size);
    *length = size;
  }
};

// Executes an instruction; returns its length, or 0 if it is none of AMX's.
int execute(const Instruction& i) {
  if (!i.is_tile()) return 0;
  greg_t base, index;
  int length = 5;
  if (i.opcode() == 0x5C && i.prefix() == 2) return dot_bfloat16(i.reg(), i.rm(), i.third()), length;
  if (i.opcode() == 0x5E && i.prefix() == 2) return dot_bytes(i.reg(), i.rm(), i.third()), length;
  if (i.opcode() == 0x49 && i.mod() == 3) {  // TILEZERO or TILERELEASE
    if (i.prefix() == 3)
      std::memset(tiles.data[i.reg()], 0, sizeof tiles.data[0]);
    else
      tiles = {};
    return length;
  }
  if (i.opcode() == 0x49 && i.prefix() == 0) {  // LDTILECFG
    i.memory(&base, &index, &length);
    tiles = {};
    std::memcpy((void*)&tiles, (const void*)(base + index), 64);
    bool valid = tiles.palette == 1 && !tiles.start_row;
    for (int t = 0; t < 16; ++t)
      valid = valid && (t < 8 ? tiles.rows[t] <= 16 && tiles.row_bytes[t] <= 64
                              : !tiles.rows[t] && !tiles.row_bytes[t]);
    return valid ? length : 0;
  }
  if (i.opcode() == 0x4B && (i.prefix() == 2 || i.prefix() == 3)) {  // TILESTORED, TILELOADD
    i.memory(&base, &index, &length);
    const int tile = i.reg(), bytes = tiles.row_bytes[tile];
    if (tiles.palette != 1 || !tiles.rows[tile]) return 0;
    if (i.prefix() == 3) std::memset(tiles.data[tile], 0, sizeof tiles.data[tile]);
    for (int row = 0; row < tiles.rows[tile]; ++row) {
      void* memory = (void*)(base + row * index);
      if (i.prefix() == 3)
        std::memcpy(tiles.data[tile][row], memory, bytes);
      else
        std::memcpy(memory, tiles.data[tile][row], bytes);
    }
    return length;
  }
  return 0;
}

void handle(int, siginfo_t*, void* context) {
  greg_t* registers = ((ucontext_t*)context)->uc_mcontext.gregs;
  const int length = execute({(const uint8_t*)registers[REG_RIP], registers});
  registers[REG_RIP] += length;
  __atomic_fetch_add(&executed, 1, __ATOMIC_RELAXED);
  if (!length) signal(SIGILL, SIG_DFL);  // the instruction is repeated and ends the process
}

}  // namespace

extern "C" void amx_emulator_install() {
  struct sigaction action = {};
  action.sa_sigaction = handle;
  action.sa_flags = SA_SIGINFO | SA_NODEFER;
  sigaction(SIGILL, &action, nullptr);
}

extern "C" long amx_emulator_executed() { return __atomic_load_n(&executed, __ATOMIC_RELAXED); }
