#include "textflag.h"

// func out8(port uint16, v byte)
TEXT ·out8(SB), NOSPLIT, $0-3
	MOVW port+0(FP), DX
	MOVB v+2(FP), AX
	OUTB
	RET

// func out32(port uint16, v uint32)
TEXT ·out32(SB), NOSPLIT, $0-8
	MOVW port+0(FP), DX
	MOVL v+4(FP), AX
	OUTL
	RET

// func in32(port uint16) uint32
TEXT ·in32(SB), NOSPLIT, $0-12
	MOVW port+0(FP), DX
	INL
	MOVL AX, ret+8(FP)
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
