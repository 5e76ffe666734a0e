#include "textflag.h"

// func outb(port uint16, v byte)
TEXT ·outb(SB), NOSPLIT, $0-3
	MOVW port+0(FP), DX
	MOVB v+2(FP), AX
	OUTB
	RET

// func inbWhile(port uint16, v byte) byte
TEXT ·inbWhile(SB), NOSPLIT, $0-9
	MOVW port+0(FP), DX
	MOVB v+2(FP), BX
again:
	INB
	CMPB AX, BX
	JEQ  again
	MOVB AX, ret+8(FP)
	RET

// func insb(port uint16, p *byte, n int)
TEXT ·insb(SB), NOSPLIT, $0-24
	MOVW port+0(FP), DX
	MOVQ p+8(FP), DI
	MOVQ n+16(FP), CX
	CLD
	REP
	INSB
	RET
