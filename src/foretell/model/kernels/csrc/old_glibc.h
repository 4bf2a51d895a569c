// Included before everything else in the libraries of a wheel: functions of the C library by their older versions,
// which every glibc has. Those of glibc 2.29 differ in how they report errors, which the kernels do not look at.

#pragma once

#if defined(__x86_64__)
#define FORETELL_OLD_GLIBC "GLIBC_2.2.5"
#elif defined(__aarch64__)
#define FORETELL_OLD_GLIBC "GLIBC_2.17"
#endif
#if defined(__linux__) && defined(FORETELL_OLD_GLIBC)
__asm__(".symver exp,exp@" FORETELL_OLD_GLIBC);
__asm__(".symver exp2,exp2@" FORETELL_OLD_GLIBC);
__asm__(".symver log,log@" FORETELL_OLD_GLIBC);
__asm__(".symver log2,log2@" FORETELL_OLD_GLIBC);
__asm__(".symver pow,pow@" FORETELL_OLD_GLIBC);
#endif
