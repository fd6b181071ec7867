/* Transfer: comm_start and comm_wait over a group's links. Between a pair messages go in the order
 * in which they were listed; each has a header {tag, size} that the receiver compares with what it
 * listed.
 *
 * Threading: as comm.h.
 */
#ifndef COMM_TRANSFER_H
#define COMM_TRANSFER_H

#include "comm/group.h"

Status transfer_start(Comm *comm, CommTransfer *transfers, int num_transfers, Stream *stream,
                      CommRequest *request_out) STATUS_CHECKED;
Status transfer_wait(Comm *comm, CommRequest *request, Stream *stream) STATUS_CHECKED;

/* Moves all requests of the group as far as they go without waiting. */
Status transfer_progress(Group *group, bool *moved) STATUS_CHECKED;

#endif
