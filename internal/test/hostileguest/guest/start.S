// Where the vCPUs of the hostile guest begin, and where its faults end. All of its work is done at CPL 3: a KVM without
// hardware virtualisation interprets what runs at CPL 0, a thousand times slower.
//
// The machine starts vCPU 0 at start, in 64-bit mode with the first 4 GiB mapped one to one (package vmm/boot). Its page
// tables are copied, to where devices are not told to write by chance, and made accessible to CPL 3, so that the devices'
// registers and all of RAM are. IOPL is 3, and the maps of ports in the task-state segments allow every port: a KVM
// that runs CPL 3 without hardware virtualisation looks there.

#include "layout.h"

.set KERNEL_CODE, 0x10
.set USER_DATA, 0x20 | 3
.set USER_CODE, 0x28 | 3
.set TSS0, 0x30
.set TSS1, 0x40
.set TSS_SIZE, 104	// what follows it is the map of ports
.set PORTS_SIZE, 8192
.set RFLAGS, 0x3002		// IOPL 3, interrupts off

.section .text.start, "ax"
.globl start
.code64
start:
	cli
	movl	$stack0, %esp
	lgdt	gdt_pointer
	movl	$BOOT_TABLES, %esi
	movl	$tables, %edi
	movl	$(TABLES_SIZE / 8), %ecx
	rep movsq
	// Bit 2 of each entry: accessible at CPL 3.
	movl	$tables, %edi
1:	testb	$1, (%rdi)
	jz	2f
	orb	$4, (%rdi)
	cmpl	$(tables + 2 * 4096), %edi	// the first two point to tables
	jae	2f
	addl	$(tables - BOOT_TABLES), (%rdi)
2:	addl	$8, %edi
	cmpl	$(tables + TABLES_SIZE), %edi
	jb	1b
	movl	$tables, %eax
	movq	%rax, %cr3
	// All 32 exceptions lead to fault.
	movl	$idt, %edi
	movl	$32, %ecx
	movl	$fault, %edx
3:	movw	%dx, (%rdi)
	movl	$(0x8e00 << 16 | KERNEL_CODE), 2(%rdi)	// an interrupt gate of DPL 0; IST 0
	movl	%edx, %eax
	shrl	$16, %eax
	movw	%ax, 6(%rdi)
	addl	$16, %edi
	loop	3b
	// Task-state segments: the stack of exceptions, and the map of ports behind them (SDM volume 1, 19.5.2).
	movl	$stack0, tss0 + 4
	movl	$stack1, tss1 + 4
	movw	$TSS_SIZE, tss0 + 102
	movw	$TSS_SIZE, tss1 + 102
	movb	$0xff, tss0 + TSS_SIZE + PORTS_SIZE
	movb	$0xff, tss1 + TSS_SIZE + PORTS_SIZE
	movl	$tss0, %eax
	movl	$gdt + TSS0, %edi
	call	set_base
	movl	$tss1, %eax
	movl	$gdt + TSS1, %edi
	call	set_base
	// The code by which vCPU 1 comes from real mode (SDM volume 3, 9.9 and 11.4).
	movl	$trampoline, %esi
	movl	$TRAMPOLINE, %edi
	movl	$(trampoline_end - trampoline), %ecx
	rep movsb
	movl	$0xfee00000, %ebx
	movl	$0x1ff, 0xf0(%rbx)	// spurious vector, APIC on
	movl	$0x01000000, 0x310(%rbx)	// to vCPU 1
	movl	$0x4500, 0x300(%rbx)	// INIT
	movl	$10000, %ecx
4:	loop	4b
	movl	$0x01000000, 0x310(%rbx)
	movl	$(0x4600 | TRAMPOLINE >> 12), 0x300(%rbx)	// start-up
	lidt	idt_pointer
	movw	$TSS0, %ax
	ltr	%ax
	jmp	fault

set_base:
	movw	%ax, 2(%rdi)
	shrl	$16, %eax
	movb	%al, 4(%rdi)
	movb	%ah, 7(%rdi)
	ret

second:
	movl	$stack1, %esp
	lgdt	gdt_pointer
	lidt	idt_pointer
	movw	$TSS1, %ax
	ltr	%ax
	// Falls through.

// fault begins the vCPU's work, and begins it again when it has done what it must not.
.globl fault
fault:
	lock incq CONTROL + CONTROL_FAULTS
	cmpq	$stack0, %rsp
	movl	$frame1, %eax
	movl	$frame0, %edx
	cmovbe	%edx, %eax
	movq	%rax, %rsp
	iretq

.code16
trampoline:
	cli
	lgdtl	%cs:(trampoline_gdt - trampoline)
	movl	$0x20, %eax	// PAE
	movl	%eax, %cr4
	movl	$tables, %eax
	movl	%eax, %cr3
	movl	$0xc0000080, %ecx	// EFER: LME
	rdmsr
	orl	$0x100, %eax
	wrmsr
	movl	$0x80000011, %eax	// PG, ET, PE
	movl	%eax, %cr0
	ljmpl	$KERNEL_CODE, $second
trampoline_gdt:
	.word	gdt_end - gdt - 1
	.long	gdt
trampoline_end:
.code64

.data
.align 16
gdt:
	.quad	0, 0
	.quad	0x00af9b000000ffff, 0x00cf93000000ffff	// kernel code and data
	.quad	0x00cff3000000ffff, 0x00affb000000ffff	// user data and code
	.quad	0x0000890000000000 + TSS_SIZE + PORTS_SIZE, 0	// the task-state segments
	.quad	0x0000890000000000 + TSS_SIZE + PORTS_SIZE, 0
gdt_end:
gdt_pointer:
	.word	gdt_end - gdt - 1
	.quad	gdt
idt_pointer:
	.word	32 * 16 - 1
	.quad	idt
// What IRETQ takes.
.align 16
frame0:
	.quad	feed, USER_CODE, RFLAGS, user_stack0 - 8, USER_DATA
frame1:
	.quad	mutate, USER_CODE, RFLAGS, user_stack1 - 8, USER_DATA

.bss
.align 16
tss0:
	.skip	TSS_SIZE + PORTS_SIZE + 8
tss1:
	.skip	TSS_SIZE + PORTS_SIZE + 8
.align 4096
tables:
	.skip	TABLES_SIZE
idt:
	.skip	4096
	.skip	4096
stack0:
	.skip	4096
stack1:
	.skip	32768
user_stack0:
	.skip	32768
user_stack1:
.section .note.GNU-stack, "", @progbits
