/* A comm on paper: it has ranks and sizes and no peers. Splits have the right ranks and sizes,
 * collectives return at once and change nothing; transfers are our own bug. For accounting what a
 * rank of some world would allocate, without that world. Threading: as comm.h.
 */
#ifndef COMM_COMM_PAPER_H
#define COMM_COMM_PAPER_H

#include "comm/comm.h"

/* Owned: comm_destroy. */
Status comm_paper_create(int size, int rank, const char *label, Comm **comm_out) STATUS_CHECKED;

#endif
