"""Writers: what proposes candidates. A writer may be anything; what it proposes is judged like everything else."""

from kda2.workbench.writer.template import TemplateWriter, Writer, hypothesis_held

__all__ = ["TemplateWriter", "Writer", "hypothesis_held"]
