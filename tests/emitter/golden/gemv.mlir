// castiron emit --kernel gemv --shape 32x64 --codec q4_1 --isa avx2 --threads 2
// 724 lines, sha256 79d15226700c5629ad9f89369d1788322933c83eb8c7eca78a4da5947a893e9f
        %55:4 = scf.for %50 = %c0 to %c2 step %c1 iter_args(%51 = %c13, %52 = %c13, %53 = %c13, %54 = %c13) -> (vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>) {
          %56 = arith.subi %50, %c0 : index
          %57 = arith.addi %50, %c10 : index
          %58 = arith.divui %57, %c2 : index
          %59 = arith.muli %58, %c2 : index
          %60 = arith.remui %57, %c2 : index
          %61 = arith.addi %43, %59 : index
          %62 = arith.addi %45, %59 : index
          %63 = arith.addi %43, %59 : index
          %64 = arith.addi %45, %59 : index
          %65 = arith.addi %43, %59 : index
          %66 = arith.addi %45, %59 : index
          %67 = arith.addi %43, %59 : index
          %68 = arith.addi %45, %59 : index
          %69 = arith.addi %43, %59 : index
          %70 = arith.addi %45, %59 : index
          %71 = arith.muli %56, %c7 : index
          memref.prefetch %m1[%61, %60, %c0], read, locality<3>, data : memref<2x2x320xi8>
          memref.prefetch %m1[%62, %60, %c0], read, locality<3>, data : memref<2x2x320xi8>
          %72 = memref.load %8[%c0, %71] : memref<1x64xf32>
          %73 = vector.broadcast %72 : f32 to vector<8xf32>
          %74 = vector.load %m1[%43, %50, %c3] : memref<2x2x320xi8>, vector<32xi8>
          %75 = vector.bitcast %74 : vector<32xi8> to vector<8xi32>
          %76 = arith.andi %75, %c14 : vector<8xi32>
          %77 = arith.sitofp %76 : vector<8xi32> to vector<8xf32>
          %78 = arith.mulf %77, %73 : vector<8xf32>
          %79 = vector.load %m1[%43, %50, %c15] : memref<2x2x320xi8>, vector<32xi8>
          %80 = vector.bitcast %79 : vector<32xi8> to vector<8xi32>
          %81 = arith.andi %80, %c14 : vector<8xi32>
          %82 = arith.sitofp %81 : vector<8xi32> to vector<8xf32>
          %83 = arith.mulf %82, %73 : vector<8xf32>
          %84 = vector.load %m1[%45, %50, %c3] : memref<2x2x320xi8>, vector<32xi8>
          %85 = vector.bitcast %84 : vector<32xi8> to vector<8xi32>
          %86 = arith.andi %85, %c14 : vector<8xi32>
          %87 = arith.sitofp %86 : vector<8xi32> to vector<8xf32>
          %88 = arith.mulf %87, %73 : vector<8xf32>
          %89 = vector.load %m1[%45, %50, %c15] : memref<2x2x320xi8>, vector<32xi8>
          %90 = vector.bitcast %89 : vector<32xi8> to vector<8xi32>
          %91 = arith.andi %90, %c14 : vector<8xi32>
          %92 = arith.sitofp %91 : vector<8xi32> to vector<8xf32>
// 529 lines more
          %614 = memref.load %9[%c0, %56] : memref<1x2xf32>
          %615 = vector.broadcast %614 : f32 to vector<8xf32>
          %616 = math.fma %613, %615, %610 : vector<8xf32>
          %617 = vector.load %m1[%45, %50, %c10] : memref<2x2x320xi8>, vector<16xi8>
          %618 = vector.bitcast %617 : vector<16xi8> to vector<8xf16>
          %619 = arith.extf %618 : vector<8xf16> to vector<8xf32>
          %620 = math.fma %586, %619, %54 : vector<8xf32>
          %621 = vector.load %m1[%45, %50, %c52] : memref<2x2x320xi8>, vector<16xi8>
          %622 = vector.bitcast %621 : vector<16xi8> to vector<8xf16>
          %623 = arith.extf %622 : vector<8xf16> to vector<8xf32>
          %624 = memref.load %9[%c0, %56] : memref<1x2xf32>
          %625 = vector.broadcast %624 : f32 to vector<8xf32>
          %626 = math.fma %623, %625, %620 : vector<8xf32>
          scf.yield %596, %606, %616, %626 : vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>
        }
