// A plugin for qemu-user that counts the instructions of the emulated program between calls of getppid, and prints them.
// What it declares is of QEMU's plugin interface, version 1, whose header Debian does not ship.
#include <cinttypes>
#include <cstdio>

extern "C" {

struct qemu_plugin_tb;
using Translated = void(uint64_t id, qemu_plugin_tb* block);
using Called = void(uint64_t id, unsigned cpu, int64_t number, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t,
                    uint64_t, uint64_t, uint64_t);
void qemu_plugin_register_vcpu_tb_trans_cb(uint64_t id, Translated*);
void qemu_plugin_register_vcpu_tb_exec_inline(qemu_plugin_tb*, int operation, void* value, uint64_t addend);
void qemu_plugin_register_vcpu_syscall_cb(uint64_t id, Called*);
size_t qemu_plugin_tb_n_insns(const qemu_plugin_tb*);

__attribute__((visibility("default"))) int qemu_plugin_version = 1;

__attribute__((visibility("default"))) int qemu_plugin_install(uint64_t id, const void*, int, char**) {
  static uint64_t executed;
  qemu_plugin_register_vcpu_tb_trans_cb(id, [](uint64_t, qemu_plugin_tb* block) {
    constexpr int kAdd = 0;
    qemu_plugin_register_vcpu_tb_exec_inline(block, kAdd, &executed, qemu_plugin_tb_n_insns(block));
  });
  qemu_plugin_register_vcpu_syscall_cb(id, [](uint64_t, unsigned, int64_t number, uint64_t, uint64_t, uint64_t,
                                              uint64_t, uint64_t, uint64_t, uint64_t, uint64_t) {
    constexpr int64_t kGetppid = 173;  // of AArch64
    if (number != kGetppid) return;
    std::fprintf(stderr, "%" PRIu64 "\n", executed);
    executed = 0;
  });
  return 0;
}
}
